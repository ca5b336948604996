"""What the kernel says while caches are moved, told with its place and a remedy."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import ClassVar

from preloadd.admin.denied import denied
from preloadd.admin.world import World
from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, ErrorCode, PreloadError, ReadFailed

Command = Callable[[argparse.Namespace, World], int]

_ROOM = "make room there (space and inodes)"
_REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: "name a folder on a file system that can be written",
}
_NOT_SUCH = (errno.EEXIST, errno.ENOTDIR)


class Closed(PreloadError):
    """This user may not read or change it; the text names the owner."""

    code: ClassVar[ErrorCode] = ErrorCode.DENIED


class Busy(PreloadError):
    """Another process changes the same folder, and was waited for."""

    code: ClassVar[ErrorCode] = ErrorCode.ALREADY_RUNNING


class Several(PreloadError):
    """What went wrong with some of many, a line each; the status is that of the first."""

    def __init__(self, errors: Sequence[PreloadError]) -> None:
        self._first = errors[0]
        super().__init__("\n".join(map(str, errors)))

    @property
    def exit_status(self) -> int:
        """That of the first."""
        return self._first.exit_status


def closed(path: Path, why: str = "Permission denied") -> Closed:
    """The error of what is at `path`; root changes nothing in caches of others."""
    return Closed(denied(path, why, or_root=False))


def told(error: OSError) -> PreloadError:
    """The same as an error of ours. It has a path."""
    path, why = Path(os.fsdecode(error.filename)), error.strerror or str(error)
    if isinstance(error, PermissionError):
        return closed(path, why)
    if isinstance(error, BlockingIOError):
        return Busy(f"{one_line(path)} {why}: try again when it is done; `lslocks` tells who it is")
    if error.errno in _NOT_SUCH:
        there = next(p for p in (path, *path.parents) if os.path.lexists(p))
        return ConfigError(f"{one_line(there)} is no folder: name another")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return ConfigError(f"{one_line(path)}: {why}: name another")
    remedy = _REMEDIES.get(error.errno or 0, "see the kernel's log for its disk")
    return ReadFailed(f"{one_line(path)}: {why}: {remedy}")


def telling(command: Command) -> Command:
    """`command`, whose errors are all ours, but for those of its output."""

    @wraps(command)
    def run(options: argparse.Namespace, world: World) -> int:
        try:
            return command(options, world)
        except OSError as error:
            if error.filename is None:
                raise
            raise told(error) from error

    return run
