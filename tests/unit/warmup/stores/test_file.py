"""A folder as a store; other users are tried for real where this is root."""

import errno
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.errors import ConfigError, InsecurePath
from preloadd.warmup.stores.api import Store, StoreFault
from preloadd.warmup.stores.file import FileStore, open_file

KEY = "vllm-warmup-cache/kind/hash/name.json"
OTHER = 65533
"""A user and a group that are nobody's."""

_: type[Store] = FileStore

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o755)
    return folder


@pytest.fixture
def store(root):
    return open_file(str(root), {})


@pytest.fixture
def public(socket_dir):
    """A folder which other users can reach."""
    socket_dir.chmod(0o755)
    folder = socket_dir / "store"
    folder.mkdir()
    return folder


def as_user(user: int, group: int, act) -> str:
    """What `act` raises in a process of that user; '' if nothing. Forked: others cannot read this
    interpreter everywhere."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = ""
        try:
            os.setgroups([group])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            act()
        except BaseException as error:  # noqa: BLE001
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told


def left(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_what_one_keeps_another_finds(root, store):
    assert store.find(KEY, 100) is None
    store.keep(KEY, b"\0value")
    assert open_file(str(root), {}).find(KEY, 100) == b"\0value"
    assert left(root) == [KEY]
    assert store.name == f"file:{root}"


def test_the_first_writer_wins(root, store):
    store.keep(KEY, b"first")
    store.keep(KEY, b"second")
    assert store.find(KEY, 9) == b"first"
    assert left(root) == [KEY]


@pytest.mark.parametrize("there", [b"", b"damaged"])
def test_what_is_damaged_is_replaced_in_one_step(root, store, there):
    store.keep(KEY, b"first")
    (root / KEY).write_bytes(there)
    with (root / KEY).open("rb") as reading:
        store.replace(KEY, b"second")
        assert reading.read() == there
    assert store.find(KEY, 9) == b"second"
    assert left(root) == [KEY]


def test_a_link_is_replaced_and_not_written_through(root, store, tmp_path):
    store.keep(KEY, b"first")
    (root / KEY).rename(tmp_path / "elsewhere")
    (root / KEY).symlink_to(tmp_path / "elsewhere")
    store.replace(KEY, b"second")
    assert (tmp_path / "elsewhere").read_bytes() == b"first"
    assert store.find(KEY, 9) == b"second"


def test_of_many_writers_at_once_one_wins_and_nothing_is_left_of_the_others(root):
    values = [str(number).encode() * 5000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda value: FileStore(root).keep(KEY, value), values))
    assert FileStore(root).find(KEY, 1 << 20) in values
    assert left(root) == [KEY]


def test_without_hard_links_as_well(root, store, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store.keep(KEY, b"first")
    store.keep(KEY, b"second")
    assert store.find(KEY, 9) == b"first"
    assert left(root) == [KEY]


@given(key=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}(/[a-z]{1,5}){0,3}", fullmatch=True))
def test_any_key_stays_below_the_root(tmp_path_factory, key):
    folder = tmp_path_factory.mktemp("any")
    store = FileStore(folder)
    store.keep(key, b"v")
    assert left(folder) == [key]
    assert store.find(key, 1) == b"v"


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a/../../x", ".hidden", "a\0"])
def test_what_is_no_key_is_never_looked_for(root, store, key):
    with pytest.raises(ValueError, match="is no key"):
        store.find(key, 9)
    with pytest.raises(ValueError, match="is no key"):
        store.keep(key, b"v")
    assert not list(root.iterdir())


def test_no_more_is_read_than_was_asked_for(store):
    store.keep(KEY, b"12345")
    assert store.find(KEY, 5) == b"12345"
    with pytest.raises(StoreFault, match="5 bytes, and 4 are the most"):
        store.find(KEY, 4)


def test_all_who_may_use_the_root_may_use_what_is_made_in_it(root, store):
    root.chmod(0o750)
    before = os.umask(0o077)
    try:
        store.keep(KEY, b"v")
    finally:
        os.umask(before)
    assert (root / KEY).stat().st_mode & 0o777 == 0o640
    assert (root / KEY).parent.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("place", [KEY, str(Path(KEY).parent), KEY.partition("/")[0]])
def test_links_are_not_followed(root, store, tmp_path, place):
    elsewhere = tmp_path / "elsewhere"
    FileStore.keep(store, KEY, b"v")
    (root / place).rename(elsewhere)
    (root / place).symlink_to(elsewhere)
    with pytest.raises(InsecurePath, match=rf"{place} is a symbolic link"):
        store.find(KEY, 9)
    if place != KEY:
        with pytest.raises(InsecurePath, match="symbolic link"):
            store.keep(f"{KEY}2", b"v")


def test_the_root_itself_may_be_a_link(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    store = open_file(str(tmp_path / "link"), {})
    store.keep(KEY, b"v")
    assert store.find(KEY, 9) == b"v"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file(root, store, make):
    (root / KEY).parent.mkdir(parents=True)
    make(root / KEY)
    with pytest.raises(InsecurePath, match=r"name.json is no regular file: remove it"):
        store.find(KEY, 9)


@pytest.mark.parametrize(
    ("mode", "place"), [(0o666, KEY), (0o664, KEY), (0o777, "vllm-warmup-cache")]
)
def test_what_more_can_write_than_the_root_is_refused(root, store, mode, place):
    store.keep(KEY, b"v")
    (root / place).chmod(mode)
    with pytest.raises(InsecurePath, match=rf"writable for more.*mode {mode:04o}"):
        store.find(KEY, 9)


@as_root
@pytest.mark.parametrize(
    ("root_mode", "root_owner", "root_group", "group", "believed"),
    [
        (0o755, 0, 0, 0, False),  # somebody who may not write it
        (0o755, OTHER, 0, 0, True),  # its owner
        (0o2770, 0, OTHER, OTHER, True),  # the group that may
        (0o2770, 0, OTHER, 0, False),  # not of that group
        (0o1777, 0, 0, 0, False),  # everybody may
        (0o2777, 0, OTHER, OTHER, False),
    ],
)
def test_whose_files_are_believed(root, store, root_mode, root_owner, root_group, group, believed):
    store.keep(KEY, b"v")
    os.chown(root, root_owner, root_group)
    root.chmod(root_mode)
    os.chown(root / KEY, OTHER, group)
    if believed:
        assert store.find(KEY, 9) == b"v"
    else:
        with pytest.raises(InsecurePath, match=rf"is of user {OTHER}, who is not to write"):
            store.find(KEY, 9)


@as_root
def test_two_users_of_one_group(public):
    os.chown(public, 0, OTHER)
    public.chmod(0o2770)

    def keep():
        os.umask(0o077)
        store = open_file(str(public), {})
        store.keep("a/b", b"v")

    def find():
        store = open_file(str(public), {})
        assert store.find("a/b", 9) == b"v"
        store.keep("a/c", b"w")

    assert as_user(65531, OTHER, keep) == ""
    assert as_user(65532, OTHER, find) == ""
    assert FileStore(public).find("a/c", 9) == b"w"


@as_root
def test_a_folder_that_this_user_cannot_write(public):
    def look():
        open_file(str(public), {})

    public.chmod(0o755)
    told = as_user(65532, 65532, look)
    assert "ConfigError: user 65532 cannot write into it: let that user, or mount it" in told
    public.chmod(0o700)
    told = as_user(65532, 65532, look)
    assert "ConfigError: user 65532 cannot look into it (Permission denied): let that" in told


def test_a_disk_that_is_full_leaves_nothing(root, store):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=rf"too large.*{KEY}"):
            store.keep(KEY, bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert left(root) == []
    assert store.find(KEY, 9) is None


def test_a_root_that_goes_and_comes(root, store):
    root.rename(root.with_name("away"))
    with pytest.raises(OSError, match="store"):
        store.find(KEY, 9)
    with pytest.raises(OSError, match="store"):
        store.keep(KEY, b"v")
    root.with_name("away").rename(root)
    store.keep(KEY, b"v")
    assert store.find(KEY, 9) == b"v"


def test_a_root_that_is_no_folder_by_now_is_told(root, store):
    root.rename(root.with_name("away"))
    root.touch()
    with pytest.raises(NotADirectoryError, match=f"'{root}'"):
        store.find(KEY, 9)


def test_what_somebody_removes_is_not_there(root, store):
    store.keep(KEY, b"v")
    (root / KEY).unlink()
    assert store.find(KEY, 9) is None


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("", "no absolute path: write file:/"),
        ("srv", "no absolute path"),
        ("~/x", "no absolute path"),
        ("{root}/none", "there is no such folder: create or mount it"),
        ("{root}/file", "it is no folder: name one"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(root, path, told):
    (root / "file").touch()
    with pytest.raises(ConfigError, match=told):
        open_file(path.format(root=root), {})
