"""Files below a folder that is open, with no symbolic link followed on the way. OSError passes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from preloadd.domain.lines import one_line
from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.warmup.bundles.manifest import MAX_DEPTH, passing

BUSY_S = 30.0
"""Seconds that a cache root is waited for: somebody installs all of a bundle there, or packs it."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def entered(top: OwnedFd, path: str, *, make: bool = False) -> OwnedFd:
    """The folder `path` below the borrowed `top`; made, for this user alone, if it is not there.

    InsecurePath for a link, for what is no folder, and for one that others can write.
    """
    with ExitStack() as owned:
        folder = owned.enter_context(top.duplicate())
        for part in filter(None, path.split("/")):
            with _telling(path):
                folder = owned.enter_context(_enter(folder, part, make=make))
            mode = stat.S_IMODE(os.fstat(folder.fileno()).st_mode)
            if mode & 0o022:
                raise InsecurePath(
                    f"{one_line(part)} in {one_line(path)} is writable for group or others (mode "
                    f"{mode:04o}), who could put code of theirs there: run `chmod go-w` on it"
                )
        return OwnedFd(folder.take())


def opened(top: OwnedFd, path: str) -> OwnedFd:
    """The regular file `path` below `top`, to be read; InsecurePath for anything else."""
    parent, _, name = path.rpartition("/")
    with entered(top, parent) as folder, _telling(path):
        fd = OwnedFd(os.open(name, _READ, dir_fd=folder.fileno()))
    if not stat.S_ISREG(os.fstat(fd.fileno()).st_mode):
        fd.close()
        raise _odd(path)
    return fd


def fresh(top: OwnedFd, path: str) -> OwnedFd:
    """A new file at `path` below `top`, for this user alone, to be written; folders are made."""
    parent, _, name = path.rpartition("/")
    with entered(top, parent, make=True) as folder, _telling(path):
        fd = OwnedFd(os.open(name, _FRESH, 0o600, dir_fd=folder.fileno()))
    os.fchmod(fd.fileno(), 0o600)  # whatever the mask of this process
    return fd


def walked(top: OwnedFd, path: str, *, strict: bool = True) -> Iterator[tuple[str, os.stat_result]]:
    """Each file in the folder `path` below `top`, but for those that pass; in no order.

    InsecurePath, with its name, for what is neither file nor folder; without `strict` that is told
    as well. What goes away meanwhile is passed over.
    """
    if path.count("/") > MAX_DEPTH:
        raise InsecurePath(f"{one_line(path)} is deeper than any compiler's folder")
    with entered(top, path) as folder, _telling(path):
        found = _entries(folder)
    for name, seen in found:
        if passing(name):
            continue
        if stat.S_ISDIR(seen.st_mode):
            with suppress(FileNotFoundError):
                yield from walked(top, f"{path}/{name}", strict=strict)
        elif strict and not stat.S_ISREG(seen.st_mode):
            raise _odd(f"{path}/{name}")
        else:
            yield f"{path}/{name}", seen


def sync(top: OwnedFd, path: str) -> None:
    """Have the folder `path` below `top`, and all that is in it, on the disk."""
    with entered(top, path) as folder:
        with os.scandir(folder.fileno()) as entries:
            found = [(one.name, one.is_dir(follow_symlinks=False)) for one in entries]
        for name, is_folder in found:
            if is_folder:
                sync(folder, name)
            else:
                with opened(folder, name) as fd:
                    os.fsync(fd.fileno())
        os.fsync(folder.fileno())


def folders(top: OwnedFd, path: str) -> list[str]:
    """Names of the folders in the folder `path` below `top`; none if it is not there."""
    with suppress(FileNotFoundError), entered(top, path) as folder:
        with os.scandir(folder.fileno()) as entries:
            return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
    return []


def _entries(folder: OwnedFd) -> list[tuple[str, os.stat_result]]:
    found = []
    with os.scandir(folder.fileno()) as entries:
        for one in entries:
            with suppress(FileNotFoundError):
                found.append((one.name, one.stat(follow_symlinks=False)))
    return found


def _enter(folder: OwnedFd, name: str, *, make: bool) -> OwnedFd:
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder.fileno())
            os.chmod(name, 0o700, dir_fd=folder.fileno())  # whatever the mask of this process
    return OwnedFd(os.open(name, _FOLDER, dir_fd=folder.fileno()))


def _odd(path: str) -> InsecurePath:
    return InsecurePath(
        f"{one_line(path)} is a link, or not the plain file or folder that belongs there: remove it"
    )


@contextmanager
def _telling(path: str) -> Iterator[None]:
    """What goes wrong in here names all of `path`. The kernel refuses links as if no folders."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _odd(path) from None
        error.filename = path
        raise
