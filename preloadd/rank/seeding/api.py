"""What a rank knows of its seeding, without the code for it, TLS above all:
most ranks are not seeded, and it would make their starts longer by a tenth.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from preloadd.rank.generation import Generation
from preloadd.transport.aio import Link
from preloadd.transport.tcp import Port
from preloadd.warmup.seeding.kinds import Kind, Seeded, Wanted

T = TypeVar("T")

Admits = Callable[[bytes], Awaitable[bool]]
"""Whether a token, as `domain.tokens.presented` has it, is good now; what it is may not show in the
time that this takes."""


class Stream(Protocol):
    """A kind whose connections are no exchange: once admitted, others go on with them."""

    @property
    def name(self) -> str:
        """As requests name it."""

    def admit(self, fields: Mapping[str, object]) -> None:
        """ProtocolViolation, whose text the peer gets, unless a connection with these is due."""

    async def take(self, sock: socket.socket) -> None:
        """Pass on a borrowed connection, of which the peer knows that it was admitted."""


class Answering(Protocol):
    """What answers others: see `listener.Listener`."""

    port: Port

    async def serve(self) -> None:
        """Listen until cancelled."""


class Fetch(Protocol):
    """Asks the source of this rank, for no longer than `within` seconds."""

    def __call__(self, wanted: Wanted[T], *, within: float) -> Awaitable[Seeded[T]]:
        """What it has of what is `wanted`; never an error."""


class Exchange(Protocol):
    """Both ends of a rank's seeding: see `ends.Ends`."""

    def listener(self, kinds: Iterable[Kind], streams: Iterable[Stream] = ()) -> Answering | None:
        """What answers others, to be served; None if nobody is to be answered."""

    async def fetch(self, wanted: Wanted[T], *, within: float | None = None) -> Seeded[T]:
        """What the source has of what is `wanted`; never an error."""

    async def lend(self, link: Link) -> None:
        """Answer a loader that asks for streams to the source (see `taking`), until it hangs up."""


class Giver(Stream, Protocol):
    """What gives weights to others: see `giving.Giving`."""

    @property
    def kind(self) -> Kind:
        """What tells others of them."""

    def offer(self, generation: Generation) -> None:
        """From now on give this generation, borrowed until `withdraw`."""

    def withdraw(self) -> None:
        """Give nothing any more."""

    async def work(self) -> None:
        """Look after what sends, until cancelled."""
