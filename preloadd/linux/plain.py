"""Files and folders at places where others may have put something else: opened only if they are
such, with no symbolic link followed in the last step, and nothing waited for.

Below an open folder errors would have a part of the path at most: `named` is the whole of it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_file(
    path: str | Path, below: OwnedFd | None = None, *, named: str | Path = "", flags: int = 0
) -> OwnedFd:
    """The regular file at `path`, to be read, with more `flags`; InsecurePath for all else there.

    `below` is the borrowed folder from which a relative path leads. OSError.
    """
    named = named or path
    try:
        with naming(named):
            fd = OwnedFd(os.open(path, _READ | flags, dir_fd=_number(below)))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InsecurePath(
                f"{one_line(named)} is a symbolic link, which is not followed: put the file itself "
                "there, or remove it"
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(fd.fileno()).st_mode):
        fd.close()
        raise InsecurePath(f"{one_line(named)} is no regular file: remove it")
    return fd


def open_folder(
    path: str | Path, below: OwnedFd | None = None, *, named: str | Path = ""
) -> OwnedFd:
    """The folder at `path`; as `open_file`."""
    named = named or path
    try:
        with naming(named):
            return OwnedFd(os.open(path, _FOLDER, dir_fd=_number(below)))
    except NotADirectoryError:
        # That is also how the kernel refuses a link here.
        raise InsecurePath(
            f"{one_line(named)} is a symbolic link, or no folder: remove it"
        ) from None


def make_file(name: str, below: OwnedFd) -> OwnedFd:
    """A new file in the borrowed folder, to be written, for this user alone; OSError if one is
    there."""
    fd = OwnedFd(os.open(name, _FRESH, 0o600, dir_fd=below.fileno()))
    os.fchmod(fd.fileno(), 0o600)  # whatever the mask of this process
    return fd


def write_whole(fd: OwnedFd, content: bytes) -> None:
    """Write all of `content`, however much of it the kernel takes at once."""
    left = memoryview(content)
    while left:
        left = left[os.write(fd.fileno(), left) :]


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """An OSError from in here names `path`."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _number(folder: OwnedFd | None) -> int | None:
    return None if folder is None else folder.fileno()
