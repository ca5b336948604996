"""Reading files of a checkpoint: what the kernel answers becomes an error that names the file.

Files are read and never mapped: a disk error or a file cut short underneath is then an exception
and not a signal. Links are followed, because the Hugging Face cache is made of them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from preloadd.domain.files import FileIdentity
from preloadd.errors import CheckpointError, InsecurePath, OutOfDescriptors, ReadFailed
from preloadd.linux.fds import OwnedFd
from preloadd.linux.plain import open_file
from preloadd.weights.checkpoint.identity import identify


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read `path` with, closed at the end.

    CheckpointError if nothing is there or it is no regular file, OutOfDescriptors at the limit,
    ReadFailed if the system refuses for another reason.
    """
    with _open(path) as fd:
        yield fd.fileno()


def _open(path: Path) -> OwnedFd:
    try:
        return open_file(path, follow=True)
    except InsecurePath:
        told = f"{path} is not a regular file: put the model's file there"
        raise CheckpointError(told) from None
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(missing(path)) from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise OutOfDescriptors(
                f"{path}: {error.strerror}: raise the limit (`ulimit -n`, or LimitNOFILE= of the "
                "unit)"
            ) from error
        raise ReadFailed(refused(path, error)) from error


@contextmanager
def unchanged(path: Path, identity: FileIdentity) -> Iterator[int]:
    """As `opened`, and ReadFailed if the file is not the one of `identity`, then or at the end."""
    with opened(path) as fd:
        _same(fd, path, identity)
        yield fd
        _same(fd, path, identity)


def _same(fd: int, path: Path, identity: FileIdentity) -> None:
    if identify(fd) != identity:
        raise ReadFailed(
            f"{path} changed while the checkpoint was read: "
            "wait until whatever writes it is done, then load again"
        )


def read_at(fd: int, nbytes: int, offset: int, path: Path) -> bytes:
    """Exactly `nbytes` from `offset`, or ReadFailed naming `path`."""
    buffer = bytearray(nbytes)
    with memoryview(buffer) as view:
        read_into(fd, view, offset, path)
    return bytes(buffer)


def read_into(fd: int, target: memoryview, offset: int, path: Path) -> None:
    """Fill `target` with what the file holds from `offset` on, or ReadFailed naming `path`."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(fd, [target[done:]], offset + done)
        except OSError as error:
            raise ReadFailed(refused(path, error)) from error
        if not count:
            raise ReadFailed(
                f"{path} ends at byte {offset + done:,}, before {offset + len(target):,}: "
                "it was cut short while it was read, load again once it is complete"
            )
        done += count


def missing(path: Path) -> str:
    """What to say of a file that is not there."""
    if path.is_symlink():
        return f"{path} is a link to a file that is gone: download the model again"
    return f"{path} is missing: download the model again, or correct the path"


def refused(path: Path, error: OSError) -> str:
    """What to say of a file that the system does not let us read."""
    if isinstance(error, PermissionError):
        return f"{path}: {error.strerror}: let the user that preloadd runs as read it"
    return f"{path}: {error.strerror}: check the disk it is on and the kernel log"
