"""A launcher's private folder, which holds its notify sockets, and those that dead ones left.

A launcher that is killed cannot tidy up. Each holds a lock on its folder, which the kernel gives
back however it ends, so that the next launcher of the same user can tell whose folder is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError
from preloadd.linux.fds import OwnedFd, is_exhausted

PREFIX = "preloadd-run-"

LONGEST_TEMPORARY = 70
"""Bytes of the temporary folder's path that leave room for a socket's name below it."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that only this user may enter, with a path that is short enough for sockets.

    It is removed at the end. ConfigError, with the remedy, if it cannot be made.
    """
    try:
        parent = _temporary()
        sweep(parent)
        path, lock = _make(parent)
    except OSError as error:
        if is_exhausted(error):
            raise
        raise ConfigError(
            f"no private folder can be made below the temporary folder: {one_line(error)}: make "
            "room there, or set TMPDIR to another folder that you may write to"
        ) from error
    with lock:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove the folders in `parent` that launchers of this user left which live no more."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is somebody else's, in use, or gone meanwhile
            with OwnedFd(os.open(path, _FOLDER)) as folder:
                fcntl.flock(folder.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(folder.fileno()).st_uid == os.geteuid():
                    shutil.rmtree(path)


def _temporary() -> Path:
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= LONGEST_TEMPORARY else "/tmp")  # noqa: S108


def _make(parent: Path) -> tuple[Path, OwnedFd]:
    """A new folder and the lock on it, both the caller's."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Another launcher may take it for a dead one's as long as it is not locked.
        with suppress(FileNotFoundError):
            lock = OwnedFd(os.open(path, _FOLDER))
            with suppress(OSError):  # on a network file system nobody can lock it, nor sweep it
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            lock.close()
