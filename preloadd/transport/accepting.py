"""Accepting whoever connects. One that finds no descriptor left waits, and says so once."""

from __future__ import annotations

import errno
import logging
import math
import socket
from collections.abc import Callable
from typing import Any

import anyio

from preloadd.linux.fds import exhausted, is_exhausted

log = logging.getLogger(__name__)

_AT_ONCE = 8
"""Accepted at a time, for who comes is behind all others that wait. A rank that seeds has room for
far more of one address, so that who asks at once is heard."""

_BACK_OFF = 0.1
_QUIET = 60.0

# Not EOPNOTSUPP: that may be an error of the network that a connection came over.
_NO_LISTENER = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}

Take = Callable[[socket.socket, Any], None]
"""Owns a connected socket from now on, and hears its address. It neither waits nor fails."""


async def accept(listener: socket.socket, take: Take, who: str) -> None:
    """Have `take` get whoever connects until cancelled; `who` that is, in the words of a log.

    Borrows the listener. OSError only if it is none.
    """
    listener.settimeout(0)
    starved = Episode()
    while True:
        await anyio.wait_readable(listener)
        for _ in range(_AT_ONCE):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, ConnectionError):
                break
            except OSError as error:
                if error.errno in _NO_LISTENER:
                    raise
                if starved.begins():
                    doing = f"accepting {who}"
                    why = exhausted(error, doing) if is_exhausted(error) else f"{doing}: {error}"
                    log.warning("%s; trying again every %g s", why, _BACK_OFF)
                # The listener stays readable all the while, and only others can make room.
                await anyio.sleep(_BACK_OFF)
                break
            take(sock, address)


class Episode:
    """A trouble that is worth one line until it has been gone for a while: it comes in bursts."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._told = False

    def begins(self) -> bool:
        """Whether the trouble that was just met is a new one."""
        before, self._last = self._last, anyio.current_time()
        new = self._last - before > _QUIET
        self._told = self._told or new
        return new

    def ends(self) -> bool:
        """Whether all being well is news: once after each that was a new one."""
        news, self._told = self._told, False
        return news
