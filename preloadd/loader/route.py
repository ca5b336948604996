"""Which way the bytes of a file come: through the page cache, or past it. Pure.

What the page cache holds comes from there. What it does not hold goes the way that is faster on
this disk, which nobody knows beforehand: the first pieces of a load try both.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum, auto

SMALL = 1 << 20
"""Pieces below this many bytes go through the cache: what they cost says nothing of the disk."""

FAST = 1e9
"""Bytes a second and reader that no disk gives but the page cache does, so that there is nothing to
try where the kernel does not say what it holds."""


class Way(Enum):
    """How one piece is read."""

    CACHE = auto()
    DIRECT = auto()


@dataclass(slots=True)
class _Tried:
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def cost(self) -> float:
        """Seconds a byte; 0 before anything was tried."""
        return self.seconds / self.nbytes if self.nbytes else 0.0


class Route:
    """Decides for one load; its readers share it.

    Turns are as long as there are readers, so that mostly all of them try the same way at once.
    """

    def __init__(self, readers: int) -> None:
        self._turn = readers
        self._chosen = 0
        self._tried = {way: _Tried() for way in Way}
        self._lock = threading.Lock()

    def choose(self, *, cached: bool | None) -> Way:
        """The way of the next large piece; `cached` is None where the kernel does not tell."""
        if cached:
            return Way.CACHE
        with self._lock:
            if cached is None and self._is_fast(Way.CACHE):
                return Way.CACHE
            turn = self._chosen // self._turn
            self._chosen += 1
            if turn < len(Way):
                return tuple(Way)[turn]
            return min(Way, key=lambda way: self._tried[way].cost)

    def learn(self, way: Way, nbytes: int, seconds: float) -> None:
        """What a piece cost that was not known to be cached."""
        with self._lock:
            self._tried[way].nbytes += nbytes
            self._tried[way].seconds += seconds

    def _is_fast(self, way: Way) -> bool:
        tried = self._tried[way]
        return tried.nbytes > 0 and tried.nbytes >= FAST * tried.seconds
