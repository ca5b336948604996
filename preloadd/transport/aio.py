"""The daemon's driver of the protocol, on anyio: one connection. `transport.server` has many.

Nothing here blocks the event loop, and no peer can make a task wait without end.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import anyio

from preloadd.domain.access import Peer
from preloadd.domain.ids import LeaseId
from preloadd.errors import OutOfDescriptors, ProtocolViolation
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.seqpacket import Packet, Pressure
from preloadd.protocol import codec
from preloadd.protocol.connection import Phase, ServerConnection
from preloadd.protocol.messages import MAX_PACKET, Reply, Request

log = logging.getLogger(__name__)
_PAUSE = 0.01


class Link:
    """Packets over one connected socket, which it owns. One task may receive, one send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(0)
        self.socket = sock

    async def receive(self) -> Packet:
        """The next packet (`eof` at the end), whose descriptors are the caller's.

        ProtocolViolation and OutOfDescriptors as of `seqpacket.receive`: that packet is lost.
        """
        while True:
            # Also where a packet is there already: a client that sends without a pause must not
            # keep the loop from the others.
            await anyio.wait_readable(self.socket)
            # ECONNRESET is said once, before the packets of a peer that did not read all of ours.
            with suppress(BlockingIOError, ConnectionResetError):
                return seqpacket.receive(self.socket, MAX_PACKET)

    async def send(self, data: bytes, fds: Sequence[OwnedFd] = ()) -> None:
        """Send one packet with borrowed descriptors; waits while the peer does not read.

        OSError if the peer is gone.
        """
        while waits := self.send_now(data, fds):
            if waits is Pressure.WRITABLE:
                await anyio.wait_writable(self.socket)
            else:
                await anyio.sleep(_PAUSE)

    def send_now(self, data: bytes, fds: Sequence[OwnedFd] = ()) -> Pressure | None:
        """Send one packet with borrowed descriptors, or say what to wait for. OSError as `send`."""
        try:
            seqpacket.send(self.socket, data, [fd.fileno() for fd in fds])
        except OSError as error:
            waits = seqpacket.pressure(error)
            if waits is None:
                raise
            return waits
        return None

    def hang_up(self) -> None:
        """End the connection for every holder of the socket; whoever receives sees the end."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's socket. Copies of it elsewhere keep the connection alive."""
        self.socket.close()


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds until a first request must have come, and for answers to leave; clients at once."""

    speak: float = 10.0
    send: float = 10.0
    connections: int = 256


class Session:
    """One client, as its handler sees it: iterate over its requests, answer each before the next.

    Iteration ends when the client hangs up or was hung up on. The socket belongs to the server.
    """

    def __init__(
        self, link: Link, connection: ServerConnection[OwnedFd], peer: Peer, limits: Limits
    ) -> None:
        self.peer = peer
        self._link = link
        self._connection = connection
        self._limits = limits
        # An answer leaves without another turn of the loop. Whoever sends waits for its next
        # request before it does so again, so it keeps nobody from sending.
        self._sending = anyio.Lock(fast_acquire=True)

    @property
    def lease(self) -> LeaseId | None:
        """The lease that this connection is; from the start for one that was parked."""
        return self._connection.lease

    def fileno(self) -> int:
        """The socket, to be parked; borrowed."""
        return self._link.socket.fileno()

    def __str__(self) -> str:
        return f"client {self.peer.pid} of user {self.peer.uid}"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Request:
        if self._connection.waiting:
            raise RuntimeError(f"{codec.tag(self._connection.waiting[0])} was not answered")
        while self._connection.phase is not Phase.CLOSED:
            for request in await self._receive():
                return request
        raise StopAsyncIteration

    async def answer(self, reply: Reply, fds: Sequence[OwnedFd] = ()) -> bool:
        """Send an answer, or a change to a watching client; any task may. Whether it left.

        The descriptors are borrowed until then. A client that does not read is hung up on.
        ValueError for an answer to something that was not asked.
        """
        self._connection.answer(reply, fds)
        return await self._flush()

    async def end(self, error: Exception | None = None) -> None:
        """Hang up, on parked copies of the socket as well; an `error` is told to the client."""
        if error is not None:
            self._connection.abort(error)
        await self._flush()
        if self._connection.violation is not None:
            log.warning("%s was hung up on: %s", self, self._connection.violation)
        self._hang_up()

    async def _receive(self) -> list[Request]:
        packet = await self._packet()
        try:
            if packet.eof:
                self._connection.receive_eof()
            return self._connection.receive(packet.data, packet.fds)
        finally:
            packet.close()

    async def _packet(self) -> Packet:
        try:
            with anyio.CancelScope(deadline=self._connection.deadline):
                return await self._link.receive()
            self._connection.expire(anyio.current_time())
        except (ProtocolViolation, OutOfDescriptors) as error:
            self._connection.abort(error)
        return Packet(b"")

    async def _flush(self) -> bool:
        left = False
        try:
            async with self._sending:
                with anyio.fail_after(self._limits.send):
                    for packet in self._connection.pending():
                        await self._link.send(packet.data, packet.handles)
            left = True
        except TimeoutError:
            log.warning("%s did not read for %g s: hung up on", self, self._limits.send)
        except ConnectionError:
            log.debug("%s has hung up", self)
        except OSError as error:
            log.warning("%s cannot be answered, so it was hung up on: %s", self, error)
        finally:
            # Also when cancelled: a client that misses an answer would take the next one for it.
            if not left:
                self._hang_up()
        return self._connection.phase is not Phase.CLOSED

    def _hang_up(self) -> None:
        self._connection.receive_eof()
        self._link.hang_up()
