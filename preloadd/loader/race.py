"""Whether weights come faster from a peer than from the disk: measured, and decided by one rule.

Nothing is known of a disk before it is read: its files may be in the page cache, of which the
kernel tells nothing reliable, on a disk of this host, or on a file server. So a few hundred
megabytes, spread over all files, are read for a fraction of a second, as a load would read them.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from preloadd.linux.threads import starting
from preloadd.loader.source import OpenFile, opened_direct
from preloadd.memory.api import ALIGNED, PIECE
from preloadd.weights.checkpoint.header import ShardHeader
from preloadd.weights.checkpoint.reading import unchanged

SAMPLE_S = 0.3
"""Seconds in which reads of the sample are begun."""

MOST_SAMPLES = 64

_Place = tuple[ShardHeader, int, int]


@dataclass(frozen=True, slots=True)
class Rule:
    """When a peer is asked, and when it is given up, by the `disk`'s pace in bytes a second.

    It is asked if the disk takes longer than `enough_s`: that is about what asking costs, and what
    a sender takes to start. It is given up unless it is `ahead` times as fast as the disk in its
    first `trial_s` seconds, or once it has taken twice as long as the disk would have altogether.
    """

    enough_s: float = 1.0
    ahead: float = 1.0
    trial_s: float = 0.5
    least_s: float = 5.0

    def asks(self, nbytes: int, disk: float) -> bool:
        """Whether a peer is to be asked for `nbytes`."""
        return self._disk_s(nbytes, disk) > self.enough_s

    def patience_s(self, nbytes: int, disk: float) -> float:
        """Seconds in which a peer has to have answered: what is lost if there is none."""
        return min(max(self._disk_s(nbytes, disk) / 4, 1.0), self.least_s)

    def keeps(self, nbytes: int, disk: float, *, came: int, seconds: float) -> bool:
        """Whether a peer that sent `came` bytes in `seconds` goes on."""
        if seconds >= self.trial_s and came < self.ahead * disk * seconds:
            return False
        return seconds < self.most_s(nbytes, disk)

    def most_s(self, nbytes: int, disk: float) -> float:
        """Seconds that a peer has for all of it."""
        return max(2 * self._disk_s(nbytes, disk), self.least_s)

    def _disk_s(self, nbytes: int, disk: float) -> float:
        return nbytes / disk if disk else math.inf


def disk_pace(shards: Sequence[ShardHeader], *, threads: int, direct: bool) -> float:
    """Bytes a second that `threads` threads read of these files; with `direct` past the page cache
    what is not in it. ReadFailed, CheckpointError, OutOfDescriptors."""
    places = _Places(_spread(shards))
    started = time.monotonic()
    with starting("measuring the disk"), ThreadPoolExecutor(threads, "measuring") as pool:
        reading = [pool.submit(_read, places, started + SAMPLE_S, direct) for _ in range(threads)]
        nbytes = sum(done.result() for done in reading)
    return nbytes / (time.monotonic() - started)


class _Places:
    """Places to read, for several threads."""

    def __init__(self, places: Iterator[_Place]) -> None:
        self._places = places
        self._lock = threading.Lock()

    def next(self) -> _Place | None:
        with self._lock:
            return next(self._places, None)


def _spread(shards: Sequence[ShardHeader]) -> Iterator[_Place]:
    """Up to MOST_SAMPLES places of a piece each, evenly over all bytes of the files."""
    total = sum(shard.identity.size for shard in shards)
    count = min(MOST_SAMPLES, -(-total // PIECE))
    # In an order in which the first few are spread as well.
    for number in sorted(range(count), key=lambda number: int(f"{number:06b}"[::-1], 2)):
        at = number * total // count
        for shard in shards:
            size = shard.identity.size
            if at < size:
                offset = at // ALIGNED * ALIGNED
                yield shard, offset, min(PIECE, size - offset)
                break
            at -= size


def _read(places: _Places, until: float, direct: bool) -> int:  # noqa: FBT001
    nbytes = 0
    with ExitStack() as undo:
        area = mmap.mmap(-1, PIECE)
        undo.callback(area.close)
        buffer = undo.enter_context(memoryview(area))
        while (place := places.next()) is not None:
            shard, offset, length = place
            with unchanged(shard.path, shard.identity) as fd, ExitStack() as both:
                past = both.enter_context(opened_direct(fd)) if direct else None
                file = OpenFile(shard.path, fd, past)
                if file.direct and not file.cached(offset, length):
                    file.read_direct(buffer, offset, length)
                else:
                    with buffer[:length] as window:
                        file.read(window, offset)
            nbytes += length
            if time.monotonic() > until:
                break
    return nbytes
