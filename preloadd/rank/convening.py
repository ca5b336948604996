"""Where the ranks of a group that spans hosts meet: the port of rank 0, for as long as it lives.

What is said is judged by `protocol.gathering`. No peer can end this, or make another one wait.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.abc import TaskGroup

from preloadd.domain.ids import Role
from preloadd.domain.meeting import is_one_host
from preloadd.domain.settings import Rendezvous
from preloadd.errors import ProtocolViolation
from preloadd.protocol import rendezvous as r
from preloadd.protocol.gathering import OWN, Convener, Send
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
        to_own: Callable[[r.FromConvener], None],
    ) -> None:
        self.port = tcp.Port(self._listen, partial(no_port, place))
        self._convener = convener
        self._place = place
        self._to_own = to_own
        self._guests: dict[int, _Guest] = {}
        self._leaving: set[int] = set()
        self._numbers = OWN
        self._crowded = Episode()

    def say(self, message: r.FromMember) -> None:
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

    async def _listen(self) -> list[socket.socket]:
        """Where others can connect; OSError if they cannot."""
        listeners = await tcp.listen(self._place.address, self._place.port)
        hosts = [listener.getsockname()[0] for listener in listeners]
        if all(map(is_one_host, hosts)) and not is_one_host(self._place.address):
            for listener in listeners:
                listener.close()
            raise OSError(
                f"on this host it means {', '.join(hosts)}, which no other host can reach: see "
                "/etc/hosts, or give all nodes the number of node 0's address"
            )
        return listeners

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
        with closing(guest.wire), guest.patience:
            why = f"did not say within {JOIN_S:g} s who it is"
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(guest.wire.write)
                    why = await self._heard(source, guest)
                    tasks.cancel_scope.cancel()
            except Exception:
                log.exception("a rank at %s was hung up on, because hearing it failed", who)
                why = "could not be heard"
            finally:
                self._guests.pop(source, None)
                self._leaving.discard(source)
        log.debug("%s %s", who, why)
        self._perform(self._convener.gone(source, why))

    async def _heard(self, source: int, guest: _Guest) -> str:
        """Take what a guest says until the end of that; why it ended."""
        frames = r.Frames()

        def take(data: bytes) -> None:
            for frame in [] if guest.wire.finished else frames.receive(data):
                message = r.decode_from_member(frame)
                if source not in self._leaving:
                    guest.patience.deadline = math.inf
                    now = anyio.current_time()
                    self._perform(self._convener.received(source, message, now))

        return await hear(guest.wire, take)

    def _perform(self, sends: Sequence[Send]) -> None:
        for send in sends:
            if send.to == OWN:
                self._to_own(send.message)
            elif (guest := self._guests.get(send.to)) is not None:
                guest.wire.post(r.encode(send.message))
                if send.last:
                    guest.wire.finish()
                    guest.patience.deadline = anyio.current_time() + _LEAVE_S
                    self._leaving.add(send.to)


async def hear(wire: tcp.Wire, take: Callable[[bytes], None]) -> str:
    """Have `take` get what a peer says, until it breaks the rules or hangs up; which of them."""
    try:
        while data := await wire.receive():
            take(data)
    except ProtocolViolation as error:
        return f"broke the protocol: {error}"
    except OSError as error:
        return f"hung up ({error.strerror})"
    return "hung up"


def no_port(place: Rendezvous, error: OSError) -> str:
    """Why rank 0 cannot listen, and what to do."""
    who = "ranks of this group's draft" if place.role is Role.DRAFT else "ranks of this group"
    told = f"the {who} cannot meet at {place.where}: "
    if isinstance(error, socket.gaierror):
        return (
            f"{told}this host does not know {place.address} ({error.strerror}): give all nodes a "
            "name of node 0 that each of them knows, or its address"
        )
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{told}port {place.port} is taken: see `ss -ltnp 'sport = :{place.port}'` for by "
                f"whom, and stop that, or give all nodes another {place.setting}"
            )
        case errno.EADDRNOTAVAIL:
            return (
                f"{told}{place.address} is no address of this host, which has rank 0: give all "
                "nodes an address of node 0 or, if this is not the first node, give it a node_rank "
                "(data_parallel_start_rank) of its own"
            )
        case errno.EACCES:
            return (
                f"{told}this user may not listen at port {place.port}: give all nodes another "
                f"{place.setting}, from 1024 up"
            )
        case _:
            return f"{told}{error.strerror or error}"
