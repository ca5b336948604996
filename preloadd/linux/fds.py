"""Owned file descriptors: a signature with `int` borrows one, one with `OwnedFd` takes it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from contextlib import suppress
from typing import Self

from preloadd.errors import OutOfDescriptors
from preloadd.linux.owner import Owner

MAX_FDS = 253
"""Descriptors one packet can carry: the kernel's SCM_MAX_FD."""


class OwnedFd(Owner):
    """One descriptor with one owner. Closing twice is harmless, using it after is an error."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        if fd < 0:
            raise ValueError(f"{fd} is no file descriptor")
        self._fd = fd

    def fileno(self) -> int:
        """The number, still owned by this object; ValueError after `close` or `take`."""
        if self._fd < 0:
            raise ValueError("the descriptor was closed or taken")
        return self._fd

    def take(self) -> int:
        """The number; from now on it is the caller's to close."""
        fd, self._fd = self.fileno(), -1
        return fd

    @classmethod
    def copy_of(cls, fd: int) -> Self:
        """A close-on-exec duplicate of a borrowed descriptor."""
        return cls(os.dup(fd))

    def duplicate(self) -> OwnedFd:
        """A second, close-on-exec descriptor of the same file."""
        return OwnedFd(os.dup(self.fileno()))

    @property
    def closed(self) -> bool:
        """Whether the descriptor was closed or taken."""
        return self._fd < 0

    def close(self) -> None:
        """Close the descriptor unless that was done or it was taken."""
        if self._fd >= 0:
            os.close(self.take())

    def __repr__(self) -> str:
        return "OwnedFd(closed)" if self.closed else f"OwnedFd({self._fd})"


def widen(table: int = 512) -> None:
    """Have the kernel make room for `table` descriptors now, unless a limit forbids it.

    It makes a new table whenever one is full, and in a process with threads waits for every
    processor then: 20 ms on a large host, on the way of whoever receives many descriptors.
    """
    with suppress(OSError), OwnedFd(os.open("/", os.O_PATH | os.O_CLOEXEC)) as some:
        OwnedFd(fcntl.fcntl(some.fileno(), fcntl.F_DUPFD_CLOEXEC, table - 1)).close()


def is_exhausted(error: OSError) -> bool:
    """Whether `error` says that a descriptor limit was reached."""
    return error.errno in {errno.EMFILE, errno.ENFILE}


def exhausted(error: OSError, doing: str) -> OutOfDescriptors:
    """What to raise for an `error` that `is_exhausted`: names the limit and how to raise it."""
    if error.errno == errno.ENFILE:
        return OutOfDescriptors(
            f"{doing}: the system has no file left to open: raise the sysctl fs.file-max"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OutOfDescriptors(
        f"{doing}: this process may have {soft} open files (hard limit {hard}): raise the limit "
        "with `ulimit -n`, or with LimitNOFILE= in a systemd unit"
    )
