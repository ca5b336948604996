"""The loader's line to its rank: progress, chunks, the manifest, or why there will be none."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from preloadd.errors import PreloadError, ProtocolViolation
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.seqpacket import connected
from preloadd.memory.api import WritableChunk
from preloadd.protocol import codec
from preloadd.protocol.messages import (
    LINK,
    ChunkFilled,
    Failed,
    Identified,
    ManifestWritten,
    Order,
    Progress,
    Tuned,
    Warmable,
)
from preloadd.transport.blocking import Link

log = logging.getLogger(__name__)

EVERY_S = 0.2
"""Seconds between two reports of progress within one phase."""


def passed_link(given: Mapping[str, Sequence[OwnedFd]], who: str) -> Link | None:
    """The link among the descriptors that were `given`, from which it is taken; the caller owns it.

    None if there is none, which people who start `who` by hand are told.
    """
    passed = given.get(LINK, [])
    if len(passed) == 1:
        with suppress(ProtocolViolation):
            return Link(connected(passed[0]))
    log.error("%s is started by its rank, which passes it a socket to talk over", who)
    return None


class Reporter:
    """Talks to the rank over a borrowed link. OSError from any call means that the rank is gone.

    `frees` is as in the order.
    """

    def __init__(self, link: Link, *, clock: Callable[[], float]) -> None:
        self.frees: int | None = None
        self._link = link
        self._clock = clock
        self._phase = ""
        self._last = float("-inf")

    def order(self) -> Order:
        """What the rank wants loaded; ProtocolViolation if it says something else."""
        order = codec.decode_order(self._heard("said what to load"))
        self.frees = order.frees
        return order

    def identified(self, key: Mapping[str, str]) -> None:
        """Tell the key of what would be loaded; returns when all ranks agree on it, and what it
        replaces is gone.

        ProtocolViolation if the rank says something else; it ends this process if they disagree.
        """
        self._link.send(codec.encode(Identified(key=dict(key))))
        codec.decode_proceed(self._heard("let this load proceed"))

    def warmable(self, warmable: Warmable, *, within: float) -> bool:
        """Tell which tables are looked for; whether this loader is to tune its own.

        ProtocolViolation if the rank says something else, TimeoutError if it says nothing.
        """
        self._link.send(codec.encode(warmable))
        if not warmable.tunes:
            return False
        return codec.decode_tune(self._heard("said whether to tune", within=within)).wanted

    def tuned(self, tuned: Tuned) -> None:
        """Tell how tuning ended."""
        self._link.send(codec.encode(tuned))

    def _heard(self, due: str, *, within: float = math.inf) -> bytes:
        packet = self._link.receive(deadline=time.monotonic() + within)
        packet.close()
        if packet.eof:
            raise ProtocolViolation(f"the rank is gone before it {due}")
        return packet.data

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Tell how many bytes of this phase are done, unless that was just told."""
        now = self._clock()
        if phase == self._phase and done < total and now - self._last < EVERY_S:
            return
        self._phase, self._last = phase, now
        self._link.send(codec.encode(Progress(phase=phase, done=done, total=total)))

    def chunk(self, index: int, chunk: WritableChunk) -> None:
        """Hand over a copy of the descriptor of a filled chunk."""
        message = ChunkFilled(index=index, nbytes=chunk.nbytes)
        self._link.send(codec.encode(message), [chunk.fd])

    def manifest(self, encoded: bytes) -> None:
        """Hand over the encoded manifest, sealed: the load is complete."""
        with sealed_bytes("preloadd-manifest", encoded) as fd:
            self._link.send(codec.encode(ManifestWritten(nbytes=len(encoded))), [fd])

    def failed(self, error: PreloadError) -> None:
        """Say why there will be no weights."""
        self._link.send(codec.encode(Failed(code=error.code, detail=str(error))))


class Tally:
    """Adds up the bytes of one phase and reports them."""

    def __init__(self, reporter: Reporter, phase: str, total: int) -> None:
        self._done = 0
        self._reporter, self._phase, self._total = reporter, phase, total

    def __call__(self, nbytes: int) -> None:
        """Tell that so many more bytes are done."""
        self._done += nbytes
        self._reporter.progress(self._phase, min(self._done, self._total), self._total)
