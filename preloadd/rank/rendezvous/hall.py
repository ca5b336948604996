"""Where the ranks of a group that spans hosts meet: at rank 0, for as long as it lives.

What is said is judged by the convener. No peer can end this, or make another one wait.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.abc import TaskGroup

from preloadd.domain.settings import Rendezvous
from preloadd.protocol.rendezvous.convener import OWN, Convener, Send
from preloadd.protocol.rendezvous.frames import decode_from_member, encode
from preloadd.protocol.rendezvous.messages import FromConvener, FromMember
from preloadd.rank.rendezvous.hearing import hear
from preloadd.rank.rendezvous.port import port_at
from preloadd.transport import tcp
from preloadd.transport.accepting import Episode

log = logging.getLogger(__name__)

JOIN_S = 10.0
"""Seconds until somebody who connected must have said who it is."""

_LEAVE_S = 5.0
_FAREWELL_S = 2.0
_POLL_S = 0.01
_SPARE = 16


@dataclass(frozen=True, slots=True)
class _Guest:
    wire: tcp.Wire
    patience: anyio.CancelScope


class Hall:
    """Rank 0's port, and everybody who is connected to it.

    `to_own` is told what rank 0 itself is.
    """

    def __init__(
        self,
        convener: Convener,
        place: Rendezvous,
        to_own: Callable[[FromConvener], None],
    ) -> None:
        self.port = port_at(place)
        self._convener = convener
        self._place = place
        self._to_own = to_own
        self._guests: dict[int, _Guest] = {}
        self._leaving: set[int] = set()
        self._numbers = OWN
        self._crowded = Episode()

    def say(self, message: FromMember) -> None:
        """Rank 0 itself says something."""
        self._perform(self._convener.received(OWN, message, anyio.current_time()))

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._perform(self._convener.tick(now))

    async def farewell(self) -> None:
        """Wait a moment until those who have to leave have read why."""
        with anyio.move_on_after(_FAREWELL_S):
            while self._leaving:  # noqa: ASYNC110 - many may leave, in any order
                await anyio.sleep(_POLL_S)

    async def serve(self) -> None:
        """Hear whoever comes, until cancelled."""
        async with anyio.create_task_group() as tasks:
            await self.port.serve(partial(self._welcome, tasks), "a rank")

    def _welcome(self, tasks: TaskGroup, sock: socket.socket, address: tuple[str, int]) -> None:
        here = len(self._guests)
        if here >= 2 * self._place.world + _SPARE:
            if self._crowded.begins():
                log.warning("%d connections are open: who says nothing makes room for more", here)
            if not self._made_room():
                sock.close()
                return
        self._numbers += 1
        patience = anyio.CancelScope(deadline=anyio.current_time() + JOIN_S)
        guest = self._guests[self._numbers] = _Guest(tcp.Wire(sock), patience)
        tasks.start_soon(self._receive, self._numbers, guest, f"{address[0]}:{address[1]}")

    def _made_room(self) -> bool:
        """Hang up on whoever has said nothing for longest; false if all have said who they are.

        A rank says so at once, and would take being turned away itself for the end of rank 0.
        """
        for source, guest in self._guests.items():
            if guest.patience.deadline < math.inf and source not in self._leaving:
                guest.patience.cancel()
                del self._guests[source]
                return True
        return False

    async def _receive(self, source: int, guest: _Guest, who: str) -> None:
        """Hear one guest until it leaves."""

        def take(message: FromMember) -> None:
            guest.patience.deadline = math.inf
            self._perform(self._convener.received(source, message, anyio.current_time()))

        with closing(guest.wire), guest.patience:
            why = f"did not say within {JOIN_S:g} s who it is"
            try:
                why = await hear(guest.wire, decode_from_member, take)
            except Exception:
                log.exception("a rank at %s was hung up on, because hearing it failed", who)
                why = "could not be heard"
            finally:
                self._guests.pop(source, None)
                self._leaving.discard(source)
        log.debug("%s %s", who, why)
        self._perform(self._convener.gone(source, why))

    def _perform(self, sends: Sequence[Send]) -> None:
        for send in sends:
            if send.to == OWN:
                self._to_own(send.message)
            elif (guest := self._guests.get(send.to)) is not None:
                guest.wire.post(encode(send.message))
                if send.last:
                    guest.wire.finish()
                    guest.patience.deadline = anyio.current_time() + _LEAVE_S
                    self._leaving.add(send.to)
