"""A look at the room that there is, before anything is loaded into it."""

from __future__ import annotations

import time

from preloadd.errors import OutOfRoom
from preloadd.memory.api import Filler

_FREED_S = 5.0
_POLL_S = 0.05


def require_room(filler: Filler, wanted: int, *, part: bool = False, freed: int = 0) -> int:
    """Bytes that a filler has free, with those that will be `freed`; OutOfRoom where these are not
    `wanted`. With `part`, more will be wanted."""
    free, limit = filler.room()
    if wanted > free + freed:
        if freed:
            gone = f"once the {freed:,} bytes of the weights before are gone"
            limit = f"{limit.removesuffix(',')}, {gone},"
        raise OutOfRoom(wanted=wanted, free=free + freed, limit=limit, part=part)
    return free + freed


def await_room(filler: Filler, wanted: int, *, part: bool = False, hoped: int = 0) -> None:
    """As `require_room`, where room was just made elsewhere: a driver may take a moment for it. So
    long `hoped` bytes are waited for too, which need not come."""
    deadline = time.monotonic() + _FREED_S
    while max(wanted, hoped) > filler.available() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    require_room(filler, wanted, part=part)
