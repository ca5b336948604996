import os
from pathlib import Path

import pytest

from preloadd.domain.ids import Role, device_id
from preloadd.engine.discovery import Candidate, candidates, found, host_device
from preloadd.engine.options import Options
from preloadd.errors import ConfigError, InsecurePath, Unavailable
from tests.listening import listen

NOBODY = 65534
DEVICE = device_id("CPU-0")
ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/7", "TMPDIR": "/scratch"}


# -- devices --


def test_the_host_device_is_that_of_the_rank():
    assert [host_device({}, rank) for rank in range(2)] == ["CPU-0", "CPU-1"]
    listed = {"PRELOADD_DEVICES": " CPU-4, CPU-7 ,"}
    assert [host_device(listed, rank) for rank in range(2)] == ["CPU-4", "CPU-7"]
    assert host_device({"PRELOADD_DEVICES": " , "}) == "CPU-0"


def test_too_few_or_strange_devices_are_refused():
    with pytest.raises(ConfigError, match="PRELOADD_DEVICES names 1 devices, but this is rank 1"):
        host_device({"PRELOADD_DEVICES": "CPU-4"}, 1)
    with pytest.raises(ConfigError, match="'cpu4' is no device"):
        host_device({"PRELOADD_DEVICES": "cpu4"})


# -- candidates --


def paths(options: Options, environ=None, role: Role = Role.TARGET) -> list[str]:
    return [str(c.path) for c in candidates(options, DEVICE, role, environ or {}, 1000)]


def test_a_socket_that_was_given_is_the_only_candidate():
    (only,) = candidates(Options(socket_path=Path("/a/b.sock")), DEVICE, Role.TARGET, ENVIRON, 7)
    assert only == Candidate(Path("/a/b.sock"))
    (relative,) = paths(Options(socket_path=Path("b.sock")))
    assert relative == str(Path.cwd() / "b.sock")


def test_a_folder_that_was_given_is_the_only_one():
    assert paths(Options(socket_dir=Path("/a")), ENVIRON) == ["/a/CPU-0/rank.sock"]
    assert paths(Options(socket_dir=Path("/a")), role=Role.DRAFT) == [
        "/a/CPU-0.draft/rank_draft.sock"
    ]


def test_the_usual_folders_are_searched_in_order():
    chosen = ENVIRON | {"PRELOADD_SOCKET_DIR": "/chosen"}
    found = candidates(Options(), DEVICE, Role.TARGET, chosen, 1000)
    assert [(str(c.path), c.derived) for c in found] == [
        ("/chosen/CPU-0/rank.sock", False),
        ("/run/preloadd/CPU-0/rank.sock", False),
        ("/run/user/7/preloadd/CPU-0/rank.sock", True),
        ("/scratch/preloadd-1000/CPU-0/rank.sock", True),
    ]
    assert paths(Options(), {})[-1] == "/tmp/preloadd-1000/CPU-0/rank.sock"


# -- what is there --


def place(folder: Path, *, derived: bool = False) -> Candidate:
    return Candidate(folder / "CPU-0" / "rank.sock", folder, derived)


@pytest.fixture
def listening(socket_dir: Path):
    """Makes a socket below a folder of that name; it listens until the end of the test."""
    socks = []

    def listening(name: str, *, derived: bool = False) -> Candidate:
        made = place(socket_dir / name, derived=derived)
        made.path.parent.mkdir(mode=0o700, parents=True)
        made.folder.chmod(0o700)
        socks.append(listen(made.path, 0o600, 1))
        return made

    yield listening
    for sock in socks:
        sock.close()


def test_what_is_there_is_found_in_order(listening, socket_dir):
    first, second = listening("first"), listening("second")
    assert found([place(socket_dir / "none"), first, second]) == [first, second]
    assert found([Candidate(second.path)]) == [Candidate(second.path)]


def test_where_nothing_is_every_path_is_told(socket_dir):
    (socket_dir / "file").touch()
    places = [place(socket_dir / "none"), place(socket_dir / "file")]
    with pytest.raises(Unavailable) as absent:
        found(places)
    assert absent.value.reason == "absent"
    assert all(str(place.path) in str(absent.value) for place in places)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_folder_that_may_not_be_looked_into_is_told_as_such(listening):
    hidden = listening("hidden")
    hidden.folder.parent.chmod(0o700)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(Unavailable, match=r"rank\.sock \(no permission to look\)"):
            found([hidden])
    finally:
        os.seteuid(0)


def linked(candidate: Candidate) -> None:
    candidate.path.rename(candidate.path.with_name("real"))
    candidate.path.symlink_to("real")


def linked_folder(candidate: Candidate) -> None:
    candidate.folder.rename(candidate.folder.with_name("real"))
    candidate.folder.symlink_to("real")


def replaced_by_a_file(candidate: Candidate) -> None:
    candidate.path.unlink()
    candidate.path.touch()


def open_to_all(candidate: Candidate) -> None:
    candidate.folder.chmod(0o777)


def opened_below(candidate: Candidate) -> None:
    candidate.path.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (linked, "rank.sock is a symbolic link"),
        (linked_folder, "is a symbolic link"),
        (replaced_by_a_file, "is no socket"),
        (open_to_all, "writable for group or others"),
        (opened_below, "CPU-0 is writable for group or others"),
    ],
)
def test_what_somebody_else_could_have_put_there_is_refused(listening, spoil, why):
    candidate, good = listening("spoilt"), listening("good")
    spoil(candidate)
    with pytest.raises(InsecurePath, match=why):
        found([candidate, good])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give away files")
@pytest.mark.parametrize("which", ["folder", "path"])
def test_what_belongs_to_somebody_else_is_refused(listening, which):
    candidate = listening("foreign")
    os.chown(getattr(candidate, which), NOBODY, -1)
    with pytest.raises(InsecurePath, match=f"belongs to user {NOBODY}"):
        found([candidate])
    os.chown(getattr(candidate, which), 0, -1)


def test_a_folder_that_nobody_chose_must_be_private(listening):
    candidate = listening("derived", derived=True)
    assert found([candidate]) == [candidate]
    candidate.folder.chmod(0o750)
    with pytest.raises(InsecurePath, match="chosen automatically"):
        found([candidate])
