import errno
import fcntl
import os
import stat
import threading
import time
from functools import partial

import pytest

from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.linux.private import (
    LOCK,
    locked_folder,
    read_private,
    remove_folder,
    replace_file,
    write_private,
)


def write(folder, content):
    with locked_folder(folder) as opened:
        write_private(opened, "f", content)


def test_content_is_replaced_whole_for_its_owner_alone(tmp_path):
    tmp_path.chmod(0o755)
    for content in (b"one", b"", b"x" * 100_000):
        write(tmp_path, content)
        assert read_private(tmp_path / "f", {os.geteuid()}) == content
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "f"]


def test_file_of_somebody_else_is_refused(tmp_path):
    write(tmp_path, b"x")
    with pytest.raises(InsecurePath, match=f"belongs to user {os.geteuid()}"):
        read_private(tmp_path / "f", {4242})


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "f", 0o600)
    with pytest.raises(InsecurePath, match="no regular file"):
        read_private(tmp_path / "f", {os.geteuid()})


def test_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "f").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path, b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "f"]


def test_replaced_file_keeps_mode_and_owner(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o640)
    replace_file(path, b"new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_writes_for_the_service_whose_folder_it_is(tmp_path):
    os.chown(tmp_path, 4242, 4243)
    write(tmp_path, b"x")
    found = (tmp_path / "f").stat()
    assert (found.st_uid, found.st_gid) == (4242, 4243)
    lock = (tmp_path / LOCK).stat()
    assert (lock.st_uid, lock.st_gid) == (4242, 4243)


def test_who_can_but_open_the_folder_keeps_nobody_out(tmp_path):
    tmp_path.chmod(0o755)
    with OwnedFd(os.open(tmp_path, os.O_RDONLY)) as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        write(tmp_path, b"x")
    assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o600


def test_lock_is_waited_for_so_long_and_no_longer(tmp_path):
    with locked_folder(tmp_path):
        since = time.monotonic()
        with pytest.raises(BlockingIOError, match="locked by another process") as caught:
            locked_folder(tmp_path, within=0.05).__enter__()
        assert 0.05 <= time.monotonic() - since < 2
    assert (caught.value.errno, caught.value.filename) == (errno.EAGAIN, str(tmp_path))
    with locked_folder(tmp_path, within=0):
        pass


def test_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InsecurePath, match=f"^{tmp_path / LOCK} is a symbolic link"):
        write(tmp_path, b"x")
    assert not (tmp_path / "elsewhere").exists()


def test_lock_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(InsecurePath, match=f"^{tmp_path / LOCK} is no regular file: remove it"):
        write(tmp_path, b"x")


@pytest.mark.parametrize("content", [[], [LOCK]])
def test_folder_is_removed_with_its_lock(tmp_path, content):
    path = tmp_path / "folder"
    path.mkdir()
    for name in content:
        (path / name).touch()
    remove_folder(path)
    assert not path.exists()


def test_folder_with_more_in_it_stays_whole(tmp_path):
    write(tmp_path, b"x")
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        remove_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "f"]


def test_one_who_waited_for_a_lock_that_was_removed_is_not_alone_with_that(tmp_path):
    """Two would be in there: one with the old lock, one with a new one."""
    seen = []

    def enter(folder):
        with locked_folder(folder):
            seen.append((folder / LOCK).stat().st_ino == inode)

    with locked_folder(tmp_path):
        waits = threading.Thread(target=partial(enter, tmp_path))
        waits.start()
        time.sleep(0.05)
        (tmp_path / LOCK).rename(tmp_path / "old")
        (tmp_path / LOCK).touch(mode=0o600)
        inode = (tmp_path / LOCK).stat().st_ino
    waits.join()
    assert seen == [True]
