"""Streams of bytes between hosts, for daemons: connect, listen, and a wire that is never waited on.

Whoever can connect is heard: these ports belong into a network that only trusted hosts are in.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress

import anyio

from preloadd.transport.accepting import Take, accept

log = logging.getLogger(__name__)

_Place = tuple[socket.AddressFamily, socket.SocketKind, int, tuple[str, int]]

_READ = 64 * 1024
_MAX_PENDING = 1 << 20
_BACKLOG = 128
_AGAIN_S = 1.0


class Wire:
    """One connected socket, which it owns. One task may `receive`, one has to `write`.

    `post` never waits and never fails: that the peer is gone is seen by whoever receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.finished = False
        self._socket = sock
        self._pending = bytearray()
        self._waiting = anyio.Event()

    async def receive(self) -> bytes:
        """What has come; empty at the end. OSError if the peer is gone."""
        while True:
            await anyio.wait_readable(self._socket)
            with suppress(BlockingIOError):
                return self._socket.recv(_READ)

    async def send(self, data: bytes) -> None:
        """Send all of `data`, however slowly the peer reads; nothing else is to be posted then.

        OSError if the peer is gone.
        """
        left = memoryview(data)
        while left:
            await anyio.wait_writable(self._socket)
            with suppress(BlockingIOError):
                left = left[self._socket.send(left) :]

    def post(self, data: bytes) -> None:
        """Send `data` now, or as soon as there is room. A peer that reads nothing is hung up on."""
        if self.finished:
            return
        self._pending += data
        self._send()
        if len(self._pending) > _MAX_PENDING:
            self.hang_up()

    def finish(self) -> None:
        """Say nothing more, and let the peer see that once it has read all there is."""
        self.finished = True
        if not self._pending:
            self._shut(socket.SHUT_WR)

    async def write(self) -> None:
        """Send what could not be sent at once, until cancelled."""
        while True:
            await self._waiting.wait()
            await anyio.wait_writable(self._socket)
            self._send()
            if self.finished and not self._pending:
                self._shut(socket.SHUT_WR)

    def hang_up(self) -> None:
        """End the connection; whoever receives sees the end."""
        self.finished = True
        self._pending.clear()
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; nobody may wait for it any more."""
        self._socket.close()

    def take(self) -> socket.socket:
        """The socket, which is the caller's from now on; nothing may be pending."""
        return self._socket

    def _send(self) -> None:
        try:
            while self._pending:
                del self._pending[: self._socket.send(self._pending)]
        except BlockingIOError:
            self._waiting.set()
            return
        except OSError:
            self._pending.clear()
        if self._waiting.is_set():
            self._waiting = anyio.Event()

    def _shut(self, how: int) -> None:
        with suppress(OSError):
            self._socket.shutdown(how)


class Port:
    """A port of this host, where listeners are what `listen` gives, or else `why` that fails.

    `fault` says why there is none; '' if there is one, or none was tried yet (`tried`).
    """

    def __init__(
        self, listen: Callable[[], Awaitable[list[socket.socket]]], why: Callable[[OSError], str]
    ) -> None:
        self.fault = ""
        self.tried = anyio.Event()
        self._listen = listen
        self._why = why

    async def serve(self, take: Take, who: str) -> None:
        """Accept for `take` until cancelled, and try again for as long as there is no port."""
        while True:
            try:
                listeners = await self._listen()
            except OSError as error:
                self._note(self._why(error))
            else:
                self._note("")
                await self._accept(listeners, take, who)
            await anyio.sleep(_AGAIN_S)

    async def _accept(self, listeners: Sequence[socket.socket], take: Take, who: str) -> None:
        """Accept until one of these, which are owned from now on, is none any more."""
        with ExitStack() as undo:
            for listener in listeners:
                undo.enter_context(listener)
            async with anyio.create_task_group() as tasks:
                for listener in listeners:
                    tasks.start_soon(self._accept_at, listener, take, who, tasks.cancel_scope)

    async def _accept_at(
        self, listener: socket.socket, take: Take, who: str, scope: anyio.CancelScope
    ) -> None:
        try:
            await accept(listener, take, who)
        except OSError as error:  # it is none any more
            self._note(self._why(error))
            scope.cancel()

    def _note(self, fault: str) -> None:
        if fault and fault != self.fault:
            log.warning("%s", fault)
        self.fault = fault
        self.tried.set()


async def connect(address: str, port: int) -> Wire:
    """A connection to the first of an address's hosts that answers; OSError of the last that did
    not. One that swallows everything leaves the others their share of the caller's time."""
    failed: OSError = OSError(errno.EADDRNOTAVAIL, f"{address} names no host")
    places = await _resolved(address, port)
    for left, (family, kind, protocol, where) in zip(
        range(len(places), 0, -1), places, strict=True
    ):
        share = (anyio.current_effective_deadline() - anyio.current_time()) / left
        with ExitStack() as undo, anyio.move_on_after(share):
            sock = socket.socket(family, kind, protocol)
            undo.callback(sock.close)
            try:
                await _connected(sock, where)
                wire = Wire(sock)
            except OSError as error:
                failed = error
                continue
            undo.pop_all()
            return wire
        failed = TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    raise failed


async def listen(address: str, port: int, backlog: int = _BACKLOG) -> list[socket.socket]:
    """Listeners on all that `address` means and this host has, the caller's to close. OSError if
    that is nothing, or one cannot be listened on.

    Of more connections at once than `backlog`, some wait for a second or more."""
    absent: OSError | None = None
    with ExitStack() as undo:
        found: list[socket.socket] = []
        for family, kind, protocol, where in await _resolved(address, port):
            try:
                found.append(undo.enter_context(_listener(family, kind, protocol, where, backlog)))
            except OSError as error:
                # A name may have an address of IPv6 where that is switched off.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error
        if absent is not None and not found:
            raise absent
        undo.pop_all()
    return found


def _listener(
    family: socket.AddressFamily,
    kind: socket.SocketKind,
    protocol: int,
    where: tuple[str, int],
    backlog: int,
) -> socket.socket:
    with ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, kind, protocol))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        sock.listen(backlog)
        undo.pop_all()
    return sock


async def _resolved(address: str, port: int) -> Sequence[_Place]:
    """What an address means, each once: a name, or numbers, of IPv6 with brackets or without."""
    found = await anyio.getaddrinfo(address.strip("[]"), port, type=socket.SOCK_STREAM)
    return [*dict.fromkeys((kind[0], kind[1], kind[2], kind[4]) for kind in found)]


async def _connected(sock: socket.socket, where: tuple[str | int, ...]) -> None:
    sock.settimeout(0)
    number = sock.connect_ex(where)
    if number == errno.EINPROGRESS:
        await anyio.wait_writable(sock)
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))
    # Where nobody listens on a port of this host, the system may connect a socket with itself.
    if sock.getsockname() == sock.getpeername():
        raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
