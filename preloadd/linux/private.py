"""Files that only their owner may read, replaced whole or not at all. OSError passes through."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.linux.plain import make_file, open_file, read_up_to, staged

MAX_NBYTES = 1 << 20

LOCK = ".preloadd-lock"
"""In a folder that is changed under a lock: not the folder itself, which whoever may open it could
lock, and hold for ever."""

LOCK_S = 5.0
"""Seconds that a lock is waited for, unless the caller knows that others need longer."""

_POLL_S = 0.02


def read_private(path: Path, owners: Collection[int]) -> bytes:
    """The content of a file of one of `owners` that nobody else can read; InsecurePath otherwise.

    At most `MAX_NBYTES` are read.
    """
    with open_file(path) as fd:
        _check(path, os.fstat(fd.fileno()), owners)
        return read_up_to(fd, MAX_NBYTES)


@contextmanager
def locked_folder(path: Path, *, within: float = LOCK_S) -> Iterator[OwnedFd]:
    """`path`, borrowed, while no other process is in here; InsecurePath if others can write it.

    BlockingIOError, which names it, if another one stays in there for `within` seconds. Its `LOCK`
    stays in there: `remove_folder` takes that away with it.
    """
    with OwnedFd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
        mode = stat.S_IMODE(os.fstat(folder.fileno()).st_mode)
        if mode & 0o022:
            raise InsecurePath(
                f"{path} is writable for group or others (mode {mode:04o}), who could replace what "
                f"is in it: run `chmod go-w {path}`"
            )
        with _lock(folder, path, within):
            yield folder


def remove_folder(path: Path) -> None:
    """Remove a folder that has nothing but its lock in it; OSError, as of `rmdir`, for others."""
    with OwnedFd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
        if _names(folder) == [LOCK]:
            with _lock(folder, path, LOCK_S):
                if _names(folder) == [LOCK]:
                    os.unlink(LOCK, dir_fd=folder.fileno())
                    path.rmdir()
                    return
    path.rmdir()


def write_private(folder: OwnedFd, name: str, content: bytes) -> None:
    """Put `content` in the place of the file `name` in the borrowed `folder`, for one owner alone:
    this user or, if that is root, the owner of the folder, whose service is to read it.

    Until all of it is on the disk the old file stays; nothing else is left behind.
    """
    _write(folder, name, content, os.fstat(folder.fileno()), mode=0o600)


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` in the place of the file at `path`, which keeps its owner and permissions."""
    found = path.stat()
    with locked_folder(path.parent) as folder:
        _write(folder, path.name, content, found)


def _names(folder: OwnedFd) -> list[str]:
    return os.listdir(folder.fileno())  # noqa: PTH208 what is open, not what is there by now


def _lock(folder: OwnedFd, path: Path, within: float) -> OwnedFd:
    """The lock of the borrowed `folder`, which is at `path`; free again once it is closed."""
    until = time.monotonic() + within
    while True:
        fd = _lock_file(folder, path)
        try:
            fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who had it may have removed it: then others have another one by now.
            if _is_there(folder, fd):
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            fd.close()
            raise
        fd.close()
        if time.monotonic() >= until:
            why = f"is locked by another process ({LOCK} in it), which was waited for {within:g} s"
            raise BlockingIOError(errno.EAGAIN, why, str(path))
        time.sleep(_POLL_S)


def _is_there(folder: OwnedFd, fd: OwnedFd) -> bool:
    with suppress(FileNotFoundError):
        there = os.stat(LOCK, dir_fd=folder.fileno(), follow_symlinks=False)
        return os.path.samestat(there, os.fstat(fd.fileno()))
    return False


def _lock_file(folder: OwnedFd, path: Path) -> OwnedFd:
    """The file, to be locked; made for the owner of the folder alone if it is not there."""
    # Written to by nobody, but some network file systems lock only what could be.
    there = partial(open_file, LOCK, folder, named=path / LOCK, flags=os.O_RDWR)
    with suppress(FileNotFoundError):
        return there()
    with suppress(FileExistsError), make_file(LOCK, folder) as fd:
        if os.geteuid() == 0:
            whose = os.fstat(folder.fileno())
            os.fchown(fd.fileno(), whose.st_uid, whose.st_gid)
        return OwnedFd(fd.take())
    return there()


def _write(
    folder: OwnedFd, name: str, content: bytes, like: os.stat_result, *, mode: int | None = None
) -> None:
    """With the owner and, unless told otherwise, the mode of `like`."""

    def dress(fd: OwnedFd) -> None:
        if os.geteuid() == 0:
            os.fchown(fd.fileno(), like.st_uid, like.st_gid)
        os.fchmod(fd.fileno(), stat.S_IMODE(like.st_mode) if mode is None else mode)

    with staged(name, folder, content, dress=dress) as fresh:
        os.replace(fresh, name, src_dir_fd=folder.fileno(), dst_dir_fd=folder.fileno())
    os.fsync(folder.fileno())


def _check(path: Path, found: os.stat_result, owners: Collection[int]) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise InsecurePath(
            f"{path} is open to group or others (mode {mode:04o}): whoever could read it has its "
            f"secrets. Run `chmod 600 {path}`, and replace what is in it"
        )
    if found.st_uid not in owners:
        raise InsecurePath(
            f"{path} belongs to user {found.st_uid}, trusted are "
            f"{', '.join(map(str, sorted(owners)))}: let one of those own it, or remove it"
        )
