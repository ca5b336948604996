from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from preloadd.errors import ConfigError, InsecurePath, OutOfDescriptors, PreloadError
from preloadd.linux.paths import (
    derived_dirs,
    origin,
    prepare_socket_dir,
    socket_dirs,
    trusted_dir,
    trusted_socket,
    trusted_users,
    unusable,
)
from tests.listening import listen

FOREIGN = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def a_folder(parent: Path, mode: int) -> Path:
    folder = parent / "sockets"
    folder.mkdir()
    folder.chmod(mode)
    return folder


def a_socket(folder: Path) -> Path:
    path = folder / "rank.sock"
    listen(path, 0o600, 1).close()
    return path


# Both sides refuse the same folders.
SIDES: list[Callable[[Path, bool], None]] = [
    lambda folder, derived: prepare_socket_dir(folder, derived=derived),
    lambda folder, derived: trusted_dir(folder, derived=derived, owners=set),
    lambda folder, derived: trusted_socket(folder / "rank.sock", derived=derived, owners=set),
]
both_sides = pytest.mark.parametrize("side", SIDES, ids=["daemon", "engine", "engine's socket"])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["/run/preloadd", "/tmp/preloadd-7"]),
        ({"PRELOADD_SOCKET_DIR": "/srv/s"}, ["/srv/s", "/run/preloadd", "/tmp/preloadd-7"]),
        (
            {"XDG_RUNTIME_DIR": "/run/user/7", "TMPDIR": "/scratch"},
            ["/run/preloadd", "/run/user/7/preloadd", "/scratch/preloadd-7"],
        ),
        (
            {"PRELOADD_SOCKET_DIR": "", "XDG_RUNTIME_DIR": "here", "TMPDIR": "tmp"},
            ["/run/preloadd", "/tmp/preloadd-7"],
        ),
    ],
)
def test_search_order(environ: dict[str, str], expected: list[str]) -> None:
    assert [str(path) for path in socket_dirs(environ, 7)] == expected


def test_nobody_chose_the_last_ones() -> None:
    environ = {"PRELOADD_SOCKET_DIR": "/srv/s", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert socket_dirs(environ, 7)[-2:] == derived_dirs(environ, 7)
    assert derived_dirs(environ, 7)[0] == Path("/run/user/7/preloadd")


@pytest.mark.parametrize(
    ("folder", "variable"),
    [("/run/user/7/preloadd", "$XDG_RUNTIME_DIR"), ("/s/preloadd-7", "$TMPDIR"), ("/tmp/x", "")],
)
def test_where_an_automatic_folder_comes_from(folder: str, variable: str) -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7", "TMPDIR": "/s/"}
    assert origin(Path(folder), environ) == variable


@pytest.mark.parametrize("derived", [True, False])
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277, 0o777])
def test_a_new_folder_is_private_whatever_the_mask(
    tmp_path: Path, derived: bool, mask: int
) -> None:
    before = os.umask(mask)
    try:
        prepare_socket_dir(tmp_path / "sockets", derived=derived)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "sockets") == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o711])
def test_a_new_folder_gets_the_mode_whatever_the_mask(tmp_path: Path, mode: int) -> None:
    mask = os.umask(0o077)
    try:
        for _ in range(2):
            prepare_socket_dir(tmp_path / "sockets", derived=False, mode=mode)
            assert mode_of(tmp_path / "sockets") == mode
    finally:
        os.umask(mask)


def test_an_existing_folder_keeps_its_mode_unless_one_is_given(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, 0o755)
    prepare_socket_dir(folder, derived=False)
    assert mode_of(folder) == 0o755


@pytest.mark.parametrize(
    ("has", "wanted", "gets"),
    [
        (0o700, 0o750, 0o750),
        (0o755, 0o700, 0o755),
        (0o755, 0o750, 0o755),
        (0o750, 0o711, 0o751),
        (0o1777, 0o711, 0o1777),
    ],
)
def test_an_existing_folder_gains_permissions_and_loses_none(
    tmp_path: Path, has: int, wanted: int, gets: int
) -> None:
    folder = a_folder(tmp_path, has)
    prepare_socket_dir(folder, derived=False, mode=wanted)
    assert mode_of(folder) == gets


@as_root
@pytest.mark.parametrize(
    ("has", "group", "gets"),
    [(0o700, 12345, 12345), (0o711, 12345, 12345), (0o755, 12345, 0), (0o700, -1, 0)],
)
def test_a_folder_goes_to_the_group_that_could_not_enter_it(
    tmp_path: Path, has: int, group: int, gets: int
) -> None:
    folder = a_folder(tmp_path, has)
    prepare_socket_dir(folder, derived=False, mode=0o750, group=group)
    assert folder.stat().st_gid == gets


def test_an_automatic_folder_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose one yourself") as caught:
        prepare_socket_dir(tmp_path / "sockets", derived=True, mode=0o750)
    assert str(tmp_path / "sockets") in str(caught.value)
    assert not (tmp_path / "sockets").exists()


def test_a_private_folder_and_its_socket_are_trusted(socket_dir: Path) -> None:
    path = a_socket(socket_dir)
    trusted_dir(socket_dir, derived=True, owners=set)
    trusted_socket(path, derived=True, owners=set)


@both_sides
@pytest.mark.parametrize("mode", [0o701, 0o710, 0o740, 0o755, 0o1777])
def test_an_automatic_folder_open_to_others_is_refused(
    socket_dir: Path, side: Callable[[Path, bool], None], mode: int
) -> None:
    folder = a_folder(socket_dir, mode)
    a_socket(folder)
    with pytest.raises(InsecurePath) as caught:
        side(folder, True)
    for part in (str(folder), f"{mode:04o}", f"chmod 700 {folder}"):
        assert part in str(caught.value)
    assert mode_of(folder) == mode
    # Chosen by the operator, it will do: nobody else can write there, or remove what is not theirs.
    side(folder, False)


@both_sides
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_any_folder_in_which_others_could_swap_sockets_is_refused(
    socket_dir: Path, side: Callable[[Path, bool], None], mode: int
) -> None:
    folder = a_folder(socket_dir, mode)
    a_socket(folder)
    with pytest.raises(InsecurePath, match="replace") as caught:
        side(folder, False)
    assert f"chmod go-w {folder}" in str(caught.value)


@both_sides
@pytest.mark.parametrize("derived", [True, False])
def test_a_link_to_a_folder_is_refused(
    socket_dir: Path, side: Callable[[Path, bool], None], derived: bool
) -> None:
    folder = a_folder(socket_dir, 0o700)
    a_socket(folder)
    link = socket_dir / "link"
    link.symlink_to(folder)
    with pytest.raises(InsecurePath, match="symbolic link") as caught:
        side(link, derived)
    assert str(link) in str(caught.value)


def test_a_dangling_link_is_refused_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InsecurePath, match="symbolic link"):
        prepare_socket_dir(tmp_path / "link", derived=False)
    assert not (tmp_path / "elsewhere").exists()


@as_root
@both_sides
@pytest.mark.parametrize("derived", [True, False])
def test_a_foreign_folder_is_refused(
    socket_dir: Path, side: Callable[[Path, bool], None], derived: bool
) -> None:
    folder = a_folder(socket_dir, 0o700)
    a_socket(folder)
    os.chown(folder, FOREIGN, -1)
    with pytest.raises(InsecurePath, match=str(FOREIGN)) as caught:
        side(folder, derived)
    assert str(folder) in str(caught.value)


@as_root
def test_a_foreign_socket_is_refused(socket_dir: Path) -> None:
    path = a_socket(socket_dir)
    os.chown(path, FOREIGN, -1)
    with pytest.raises(InsecurePath, match=str(FOREIGN)) as caught:
        trusted_socket(path, derived=False, owners=lambda: {1})
    assert str(path) in str(caught.value)


@as_root
def test_nobody_is_asked_for_owners_of_what_is_this_users_own(socket_dir: Path) -> None:
    def asked() -> set[int]:
        raise AssertionError("a name service may hang")

    path = a_socket(socket_dir)
    trusted_dir(socket_dir, derived=True, owners=asked)
    trusted_socket(path, derived=True, owners=asked)


def test_owners_named_by_the_caller_are_trusted(socket_dir: Path) -> None:
    path = a_socket(socket_dir)
    os.chown(path, FOREIGN, -1)
    os.chown(socket_dir, FOREIGN, -1)
    trusted_dir(socket_dir, derived=True, owners=lambda: {FOREIGN})
    trusted_socket(path, derived=True, owners=lambda: {FOREIGN})


def test_a_link_to_a_socket_is_refused(socket_dir: Path) -> None:
    link = socket_dir / "link.sock"
    link.symlink_to(a_socket(socket_dir))
    with pytest.raises(InsecurePath, match="symbolic link") as caught:
        trusted_socket(link, derived=False, owners=set)
    assert str(link) in str(caught.value)


def test_a_file_in_place_of_a_socket_is_refused(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    path.touch()
    with pytest.raises(InsecurePath, match="no socket"):
        trusted_socket(path, derived=False, owners=set)


def test_absence_is_told_apart_from_mistrust(socket_dir: Path) -> None:
    with pytest.raises(FileNotFoundError):
        trusted_socket(socket_dir / "rank.sock", derived=False, owners=set)
    with pytest.raises(FileNotFoundError):
        trusted_dir(socket_dir / "absent", derived=True, owners=set)
    (socket_dir / "file").touch()
    with pytest.raises(NotADirectoryError):
        trusted_dir(socket_dir / "file", derived=True, owners=set)


def test_relative_paths_are_refused() -> None:
    for side in SIDES:
        with pytest.raises(ConfigError, match="absolute"):
            side(Path("sockets"), False)


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.ENOSPC, ConfigError, "No space left on device: make room there"),
        (errno.EDQUOT, ConfigError, "make room there"),
        (errno.EISDIR, ConfigError, "Is a directory: remove it"),
        (errno.ELOOP, InsecurePath, "symbolic link.*: remove it"),
        (errno.EROFS, ConfigError, "choose a socket directory"),
        (errno.EMFILE, OutOfDescriptors, "ulimit -n"),
    ],
)
def test_what_keeps_a_file_from_being_made_is_told_on_one_line(
    number: int, kind: type[PreloadError], remedy: str
) -> None:
    told = unusable(Path("/s/a\nb"), OSError(number, os.strerror(number)))
    assert type(told) is kind
    assert "/s/a\\nb" in str(told)
    assert re.search(remedy, str(told))


def test_root_and_oneself_are_trusted():
    assert {0, os.geteuid()} <= trusted_users()
    assert FOREIGN not in trusted_users()
