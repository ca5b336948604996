"""A listening socket at a path, as a daemon has one when it is ready."""

from __future__ import annotations

import socket
from pathlib import Path

from preloadd.linux.seqpacket import Reservation


def listen(path: Path, mode: int, backlog: int, *, group: int = -1) -> socket.socket:
    """It is the caller's. A socket or file that is there already is replaced."""
    with Reservation(path, mode, group=group) as reserved:
        return reserved.listen(backlog)
