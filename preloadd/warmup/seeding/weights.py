"""Weights as a kind: `weights`, an arena whose key is the one that is asked for.

An answer is a short word of what there is, with a ticket. Who has the ticket may open streams, of
the kind `weights_stream`, over which the bytes themselves come (see `protocol.peering`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from preloadd.domain.key import canonical
from preloadd.domain.manifest import MAX_ARENA_BYTES, MAX_CHUNKS
from preloadd.errors import ProtocolViolation
from preloadd.warmup.seeding.kinds import Unfit

KIND = "weights"
STREAM = "weights_stream"

TICKET_S = 10.0
"""Seconds in which all streams for a ticket have to be opened: it is asked for just before."""

MOST_TICKETS = 64
"""Tickets that are good at a time. A further one takes the place of the oldest."""

NO_TICKET = "this ticket was not given, has expired, or is used up"

_KEY, _TICKET = "key", "ticket"
_GENERATION, _MANIFEST, _CHUNKS = "generation", "manifest", "chunks"
_MAX_TEXT = 64


@dataclass(frozen=True, slots=True)
class Held:
    """What a source has: one generation, the digest of its key, and sizes in bytes."""

    generation: str
    key: str
    manifest: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source says that it has, and what lets one open streams to it."""

    generation: str
    manifest: int
    chunks: tuple[int, ...]
    ticket: str


def digest_of(key: Mapping[str, str]) -> str:
    """What stands for a key in a request: every field counts."""
    return hashlib.blake2b(canonical(key).encode(), digest_size=32).hexdigest()


class Tickets:
    """Tickets for `each` streams. Several threads may use them; times are the caller's seconds."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, int]] = {}

    def issue(self, *, now: float) -> str:
        """A new ticket."""
        ticket = secrets.token_hex(16)
        with self._lock:
            self._forget_old(now)
            while len(self._left) >= MOST_TICKETS:
                del self._left[next(iter(self._left))]
            self._left[ticket] = (now + TICKET_S, self._each)
        return ticket

    def redeem(self, ticket: object, *, now: float) -> bool:
        """Whether one more stream may be opened for it, which is counted."""
        with self._lock:
            self._forget_old(now)
            if not isinstance(ticket, str) or ticket not in self._left:
                return False
            until, left = self._left.pop(ticket)
            if left > 1:
                self._left[ticket] = (until, left - 1)
        return True

    def withdraw(self) -> None:
        """No ticket is good any more."""
        with self._lock:
            self._left.clear()

    def _forget_old(self, now: float) -> None:
        for ticket in [ticket for ticket, (until, _) in self._left.items() if until <= now]:
            del self._left[ticket]


class WeightsKind:
    """Answers with what is `held` now, if the key is that one."""

    def __init__(
        self, held: Callable[[], Held | None], tickets: Tickets, clock: Callable[[], float]
    ) -> None:
        self._held = held
        self._tickets = tickets
        self._clock = clock

    @property
    def name(self) -> str:
        """As requests name it."""
        return KIND

    def resolve(self, fields: Mapping[str, object]) -> bytes | None:
        """The payload, as of any kind: an offer."""
        key = fields.get(_KEY)
        if not isinstance(key, str) or len(key) != _MAX_TEXT:
            raise ProtocolViolation("no digest of a key")
        held = self._held()
        if held is None or held.key != key:
            return None
        return json.dumps(
            {
                _GENERATION: held.generation,
                _MANIFEST: held.manifest,
                _CHUNKS: held.chunks,
                _TICKET: self._tickets.issue(now=self._clock()),
            }
        ).encode("ascii")


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    """Weights with the key of this digest, as `digest_of` makes it."""

    key: str

    kind: ClassVar[str] = KIND

    @property
    def fields(self) -> Mapping[str, object]:
        """What names it, in a request."""
        return {_KEY: self.key}

    def judged(self, payload: object) -> Offer:
        """The offer in `payload`, whose sizes are such as an arena may have; else Unfit."""
        if not isinstance(payload, dict):
            raise Unfit("it is no offer of weights")
        chunks = payload.get(_CHUNKS)
        if not isinstance(chunks, list) or not 0 < len(chunks) <= MAX_CHUNKS:
            raise Unfit("it offers no such number of chunks as an arena may have")
        sizes = tuple(map(_size, chunks))
        if sum(sizes) > MAX_ARENA_BYTES:
            raise Unfit("it offers more bytes than any arena has")
        generation, ticket = _text(payload.get(_GENERATION)), _text(payload.get(_TICKET))
        return Offer(generation, _size(payload.get(_MANIFEST)), sizes, ticket)


def stream_fields(ticket: str) -> Mapping[str, object]:
    """What a request for a stream holds."""
    return {_TICKET: ticket}


def ticket_in(fields: Mapping[str, object]) -> object:
    """What a request for a stream shows as its ticket."""
    return fields.get(_TICKET)


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isalnum():
        raise Unfit("it is no offer of weights: a name in it is none")
    return value


def _size(value: object) -> int:
    if type(value) is not int or not 0 < value <= MAX_ARENA_BYTES:
        raise Unfit("it is no offer of weights: a size in it is none")
    return value
