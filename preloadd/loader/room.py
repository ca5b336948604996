"""A look at the room that there is, before anything is loaded into it."""

from __future__ import annotations

import time

from preloadd.errors import OutOfRoom
from preloadd.memory.api import Filler

_FREED_S = 5.0
_POLL_S = 0.05


def require_room(filler: Filler, wanted: int, *, part: bool = False, freed: int = 0) -> None:
    """OutOfRoom where a filler has not `wanted` bytes, with those that will be `freed`; with
    `part`, more will be wanted."""
    free, limit = filler.room()
    if wanted > free + freed:
        raise OutOfRoom(wanted=wanted, free=free + freed, limit=limit, part=part)


def await_room(filler: Filler, wanted: int, *, part: bool = False) -> None:
    """As `require_room`, where room was just made elsewhere: a driver may take a moment for it."""
    deadline = time.monotonic() + _FREED_S
    while wanted > filler.room()[0] and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    require_room(filler, wanted, part=part)
