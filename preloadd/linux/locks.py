"""One daemon per instance: a lock that the kernel gives back when its holder ends, however it ends.

The number written into the file only helps people: whether somebody holds the lock is asked of the
kernel, so a stale file, a reused number or a zombie means nothing. The file is never removed, or
two daemons could each lock a file of that name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from preloadd.domain.lines import one_line
from preloadd.errors import AlreadyRunning, InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner
from preloadd.linux.paths import unusable

FILE_NAME = "rank.lock"
_MAX_NUMBER = 32


class Lock(Owner):
    """A held lock. Children that inherit its descriptor would share it, so it is close-on-exec."""

    def __init__(self, fd: OwnedFd) -> None:
        self._fd = fd

    @classmethod
    def take(cls, folder: Path, instance: str, name: str = FILE_NAME) -> Self:
        """Take the lock of `folder` for `instance`, or AlreadyRunning at once; never waits.

        ConfigError, InsecurePath or OutOfDescriptors where no file can be locked.
        """
        path = folder / name
        try:
            fd = _open(path)
        except OSError as error:
            raise unusable(path, error) from error
        with ExitStack() as undo:
            undo.callback(fd.close)
            try:
                fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = _read_number(fd.fileno())
                raise AlreadyRunning(instance, str(path), owner) from error
            except OSError as error:
                raise unusable(path, error) from error
            with suppress(OSError):  # the disk may be full, and the number is only for people
                _write_number(fd.fileno(), os.getpid())
            undo.pop_all()
        return cls(fd)

    def close(self) -> None:
        """Give the lock back."""
        self._fd.close()


def holder(path: Path) -> int | None:
    """The process that holds the lock file at `path`; None if none does, or if it cannot be known.

    Only looks: taking the lock to try it would turn away a daemon that starts just then.
    """
    try:
        fd = OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
    except (FileNotFoundError, NotADirectoryError):
        return None
    with fd:
        number, inode = _read_number(fd.fileno()), os.fstat(fd.fileno()).st_ino
    held = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    # A line tells number, kind, mode, access, process and device:inode. The device is not compared:
    # some file systems give `stat` another one.
    told = (line.split() for line in held if " FLOCK " in line)
    return number if any(_locks(words, number, inode) for words in told) else None


def _open(path: Path) -> OwnedFd:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = OwnedFd(os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # The file of an earlier daemon is as good, where a disk has become read-only since.
        fd = OwnedFd(os.open(path, flags | os.O_RDONLY))
    if not stat.S_ISREG(os.fstat(fd.fileno()).st_mode):
        fd.close()
        raise InsecurePath(f"{one_line(path)} is no regular file: remove it")
    return fd


def _locks(words: list[str], number: int | None, inode: int) -> bool:
    return words[-4] == str(number) and words[-3].rpartition(":")[2] == str(inode)


def _write_number(fd: int, pid: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % pid, 0)


def _read_number(fd: int) -> int | None:
    text = os.pread(fd, _MAX_NUMBER, 0).strip()
    return int(text) if text.isdigit() else None
