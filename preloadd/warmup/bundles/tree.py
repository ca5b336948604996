"""Files below a folder that is open, with no symbolic link followed on the way. OSError passes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from preloadd.domain.lines import one_line
from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.linux.plain import make_file, naming, open_file, open_folder
from preloadd.warmup.bundles.manifest import MAX_DEPTH, passing

BUSY_S = 30.0
"""Seconds that a cache root is waited for: somebody installs all of a bundle there, or packs it."""


def entered(top: OwnedFd, path: str, *, make: bool = False) -> OwnedFd:
    """The folder `path` below the borrowed `top`; made, for this user alone, if it is not there.

    InsecurePath for a link, for what is no folder, and for one that others can write.
    """
    with ExitStack() as owned:
        folder = owned.enter_context(top.duplicate())
        for part in filter(None, path.split("/")):
            if make:
                _make(folder, part, path)
            folder = owned.enter_context(open_folder(part, folder, named=path))
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
    with entered(top, parent) as folder:
        return open_file(name, folder, named=path)


def fresh(top: OwnedFd, path: str) -> OwnedFd:
    """A new file at `path` below `top`, for this user alone, to be written; folders are made."""
    parent, _, name = path.rpartition("/")
    with entered(top, parent, make=True) as folder, naming(path):
        return make_file(name, folder)


def walked(top: OwnedFd, path: str, *, strict: bool = True) -> Iterator[tuple[str, os.stat_result]]:
    """Each file in the folder `path` below `top`, but for those that pass; in no order.

    InsecurePath, with its name, for what is neither file nor folder; without `strict` that is told
    as well. What goes away meanwhile is passed over.
    """
    if path.count("/") > MAX_DEPTH:
        raise InsecurePath(f"{one_line(path)} is deeper than any compiler's folder")
    with entered(top, path) as folder, naming(path):
        found = _entries(folder)
    for name, seen in found:
        place = f"{path}/{name}"
        if passing(name):
            continue
        if stat.S_ISDIR(seen.st_mode):
            with suppress(FileNotFoundError):
                yield from walked(top, place, strict=strict)
        elif strict and not stat.S_ISREG(seen.st_mode):
            raise InsecurePath(
                f"{one_line(place)} is a symbolic link, or no regular file: remove it"
            )
        else:
            yield place, seen


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


def _make(folder: OwnedFd, name: str, path: str) -> None:
    with suppress(FileExistsError), naming(path):
        os.mkdir(name, 0o700, dir_fd=folder.fileno())
        os.chmod(name, 0o700, dir_fd=folder.fileno())  # whatever the mask of this process
