"""Files and folders at places where others may have put something else: opened only if they are
such, with no symbolic link followed in the last step unless that is asked for, and nothing waited
for.

Below an open folder errors would have a part of the path at most: `named` is the whole of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_KINDS = {stat.S_IFREG: "regular file", stat.S_IFDIR: "folder"}


def open_file(
    path: str | Path,
    below: OwnedFd | None = None,
    *,
    named: str | Path = "",
    flags: int = 0,
    follow: bool = False,
) -> OwnedFd:
    """The regular file at `path`, to be read, with more `flags`; InsecurePath for all else there.

    That is also said of a symbolic link, unless it is one to `follow`. `below` is the borrowed
    folder from which a relative path leads. OSError.
    """
    flags |= _READ if follow else _READ | os.O_NOFOLLOW
    return _open(path, below, named or path, flags, stat.S_IFREG)


def read_file(path: str | Path, limit: int, *, follow: bool = False) -> bytes:
    """Of the content of the regular file at `path` at most `limit` bytes; as `open_file`."""
    with open_file(path, follow=follow) as fd, naming(path):
        return read_up_to(fd, limit)


def open_folder(
    path: str | Path, below: OwnedFd | None = None, *, named: str | Path = ""
) -> OwnedFd:
    """The folder at `path`; as `open_file`."""
    return _open(path, below, named or path, _FOLDER, stat.S_IFDIR)


def make_file(name: str, below: OwnedFd) -> OwnedFd:
    """A new file in the borrowed folder, to be written, for this user alone; OSError if one is
    there."""
    fd = OwnedFd(os.open(name, _FRESH, 0o600, dir_fd=below.fileno()))
    os.fchmod(fd.fileno(), 0o600)  # whatever the mask of this process
    return fd


def read_up_to(fd: OwnedFd, limit: int) -> bytes:
    """At most `limit` bytes, all that are left otherwise, however few the kernel gives at once."""
    with open(fd.fileno(), "rb", closefd=False) as file:
        return file.read(limit)


def write_whole(fd: OwnedFd, content: bytes) -> None:
    """Write all of `content`, however much of it the kernel takes at once."""
    left = memoryview(content)
    while left:
        left = left[os.write(fd.fileno(), left) :]


@contextmanager
def staged(
    name: str,
    below: OwnedFd,
    content: bytes,
    *,
    dress: Callable[[OwnedFd], None] = lambda fd: None,
) -> Iterator[str]:
    """A new file in the borrowed folder, with all of `content` on the disk, to be given `name` in
    here: what it is called until then. If it is called that still at the end, it is removed.

    It is for this user alone, unless `dress` gives it, borrowed, to others before. OSError.
    """
    fresh = f".{name}.{os.urandom(8).hex()}"
    with ExitStack() as undo:
        with make_file(fresh, below) as fd:
            undo.callback(_remove, fresh, below)
            write_whole(fd, content)
            dress(fd)
            os.fsync(fd.fileno())
        yield fresh


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """An OSError from in here names `path`, and nothing else."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        del error.filename2
        raise


def _remove(name: str, below: OwnedFd) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=below.fileno())


def _open(
    path: str | Path, below: OwnedFd | None, named: str | Path, flags: int, wanted: int
) -> OwnedFd:
    folder = None if below is None else below.fileno()
    with ExitStack() as undo:
        try:
            with naming(named):
                fd = undo.enter_context(OwnedFd(os.open(path, flags, dir_fd=folder)))
        except OSError:
            # Any part of the path may be at fault, but what is at its end is known by a look alone.
            follow = not flags & os.O_NOFOLLOW
            with suppress(OSError):
                _require(wanted, os.stat(path, dir_fd=folder, follow_symlinks=follow), named)
            raise
        _require(wanted, os.fstat(fd.fileno()), named)
        undo.pop_all()
    return fd


def _require(wanted: int, found: os.stat_result, named: str | Path) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise InsecurePath(
            f"{one_line(named)} is a symbolic link, which is not followed: put what it leads to "
            "there, or remove it"
        )
    if stat.S_IFMT(found.st_mode) != wanted:
        raise InsecurePath(f"{one_line(named)} is no {_KINDS[wanted]}: remove it")
