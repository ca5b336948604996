"""Descriptors that whoever started this process passed to it, as service managers do.

Apart from `linux.notify`, since loaders run in an engine's Python, which need not have sdnotify.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from contextlib import suppress

from preloadd.linux.fds import OwnedFd

_FIRST_FD = 3


def inherited(environ: Mapping[str, str], pid: int) -> dict[str, list[OwnedFd]]:
    """The descriptors a manager passed to this process (its `pid`), by name; the caller owns them.

    Call it once, first thing. Several may share a name, and their order means nothing. Empty if
    there are none, or if they were meant for another process or are described wrongly.
    """
    numbers = range(_FIRST_FD, _FIRST_FD + _listed(environ, pid))
    if not all(map(_make_private, numbers)):
        return {}
    listed = environ.get("LISTEN_FDNAMES")
    names = ["unknown" for _ in numbers] if listed is None else listed.split(":")
    if len(names) != len(numbers):
        return {}
    found: dict[str, list[OwnedFd]] = {}
    for name, number in zip(names, numbers, strict=True):
        found.setdefault(name, []).append(OwnedFd(number))
    return found


def _listed(environ: Mapping[str, str], pid: int) -> int:
    with suppress(ValueError):
        if int(environ.get("LISTEN_PID", "0")) == pid:
            return max(0, int(environ.get("LISTEN_FDS", "0")))
    return 0


def _make_private(number: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    except (OSError, OverflowError):
        return False
    return True
