"""The daemon's side of a listening socket: accepts clients, and gives each a session of its own.

What is answered is the handler's business. No client can make another one wait, and none can end
the daemon.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from preloadd.domain.access import Peer
from preloadd.domain.ids import LeaseId
from preloadd.errors import AccessDenied
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.protocol.connection import ServerConnection
from preloadd.protocol.messages import Reason
from preloadd.transport.aio import Limits, Link, Session

log = logging.getLogger(__name__)
_BACK_OFF = 0.1
_QUIET = 60.0
_NO_LISTENER = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP}

Handler = Callable[[Session], Awaitable[None]]
"""Answers one client until its session ends. It returns or raises: the client is hung up on."""

Admit = Callable[[socket.socket], Peer]
"""Who connected; AccessDenied if they are not served. Nothing of theirs was read by then."""


class Server:
    """Serves clients, each in a task of its own, as long as there are not too many."""

    def __init__(self, handler: Handler, admit: Admit, limits: Limits) -> None:
        self._handler = handler
        self._admit = admit
        self._limits = limits
        self._open = 0
        self._crowded = _Episode()
        self._starved = _Episode()

    async def serve(self, listener: socket.socket) -> None:
        """Accept clients until cancelled; then their sockets are closed, but not hung up on.

        Borrows the listener. OSError only if it is none.
        """
        listener.settimeout(0)
        async with anyio.create_task_group() as clients:
            while True:
                link = Link(await self._accept(listener))
                session = self._welcome(link)
                if session is not None:
                    clients.start_soon(self._converse, session, link)

    async def resume(self, sock: socket.socket, lease: LeaseId, peer: Peer) -> None:
        """Go on with a parked connection that is `lease`, until it ends. Takes the socket."""
        self._open += 1
        link = Link(sock)
        connection = ServerConnection[OwnedFd].resumed_lease(lease)
        await self._converse(Session(link, connection, peer, self._limits), link)

    async def _accept(self, listener: socket.socket) -> socket.socket:
        while True:
            await anyio.wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:
                if error.errno in _NO_LISTENER:
                    raise
                self._note_starved(error)
                # The listener stays readable all the while, and only others can make room.
                await anyio.sleep(_BACK_OFF)
                continue
            return sock

    def _welcome(self, link: Link) -> Session | None:
        """A session for a new client; None if it was turned away, for which nothing waits."""
        deadline = anyio.current_time() + self._limits.speak
        connection = ServerConnection[OwnedFd](deadline=deadline)
        peer = self._admitted(link, connection)
        if peer is not None and self._has_room(connection):
            self._open += 1
            return Session(link, connection, peer, self._limits)
        with suppress(OSError):
            for packet in connection.pending():
                link.send_now(packet.data)
        link.hang_up()
        link.close()
        return None

    def _admitted(self, link: Link, connection: ServerConnection[OwnedFd]) -> Peer | None:
        try:
            return self._admit(link.socket)
        except AccessDenied as denied:
            log.info("turned away: %s", denied)
            connection.abort(denied)
        except Exception as error:
            log.exception("turned away, because who it is cannot be found out")
            connection.abort(error)
        return None

    def _has_room(self, connection: ServerConnection[OwnedFd]) -> bool:
        if self._open < self._limits.connections:
            return True
        connection.turn_away(Reason.BUSY, f"{self._open} clients are connected already")
        if self._crowded.begins():
            log.warning("%d clients are connected: more are turned away", self._open)
        return False

    async def _converse(self, session: Session, link: Link) -> None:
        try:
            await self._handler(session)
            await session.end()
        except Exception as error:
            log.exception("%s was hung up on, because answering it failed", session)
            await session.end(error)
        finally:
            link.close()
            self._open -= 1

    def _note_starved(self, error: OSError) -> None:
        if self._starved.begins():
            doing = "accepting a client"
            why = exhausted(error, doing) if is_exhausted(error) else f"{doing}: {error}"
            log.warning("%s; trying again every %g s", why, _BACK_OFF)


class _Episode:
    """A trouble that is worth one line until it has been gone for a while: it comes in bursts."""

    def __init__(self) -> None:
        self._last = -math.inf

    def begins(self) -> bool:
        """Whether the trouble that was just met is a new one."""
        before, self._last = self._last, anyio.current_time()
        return self._last - before > _QUIET
