"""The daemon's side of a listening socket: accepts clients, and gives each a session of its own.

What is answered is the handler's business. No client can make another one wait, and none can end
the daemon.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum, auto
from functools import partial

import anyio
from anyio.abc import TaskGroup

from preloadd.domain.access import Peer
from preloadd.domain.ids import LeaseId
from preloadd.errors import AccessDenied
from preloadd.linux.fds import OwnedFd
from preloadd.protocol.connection import ServerConnection
from preloadd.protocol.messages import Reason
from preloadd.transport.accepting import Episode, accept
from preloadd.transport.aio import Limits, Link, Session

log = logging.getLogger(__name__)

Handler = Callable[[Session], Awaitable[None]]
"""Answers one client until its session ends. It returns or raises: the client is hung up on."""

Admit = Callable[[socket.socket], Peer]
"""Who connected; AccessDenied if they are not served. Nothing of theirs was read by then."""


class Crowd(Enum):
    """Of whom there are as many as may be."""

    ALL = auto()
    OTHERS = auto()
    USER = auto()


class Server:
    """Serves clients, each in a task of its own, as long as there are not too many.

    A third of the connections is kept for root and this process's user, as whom other ranks and the
    supervisor run. Of all others, each user may have a third.
    """

    def __init__(self, handler: Handler, admit: Admit, limits: Limits) -> None:
        self._handler = handler
        self._admit = admit
        self._limits = limits
        self._open: Counter[int] = Counter()
        self._own = {0, os.geteuid()}
        self._crowded = {kind: Episode() for kind in Crowd}

    async def serve(self, listener: socket.socket) -> None:
        """Accept clients until cancelled; then their sockets are closed, but not hung up on.

        Borrows the listener. OSError only if it is none.
        """
        async with anyio.create_task_group() as clients:
            await accept(listener, partial(self._welcome, clients), "a client")

    async def resume(self, sock: socket.socket, lease: LeaseId, peer: Peer) -> None:
        """Go on with a parked connection that is `lease`, until it ends. Takes the socket."""
        self._open[peer.uid] += 1
        link = Link(sock)
        connection = ServerConnection[OwnedFd].resumed_lease(lease)
        await self._converse(Session(link, connection, peer, self._limits), link)

    def _welcome(self, clients: TaskGroup, sock: socket.socket, _: object) -> None:
        """Converse with a new client, or turn it away, for which nothing waits."""
        link = Link(sock)
        deadline = anyio.current_time() + self._limits.speak
        connection = ServerConnection[OwnedFd](deadline=deadline)
        peer = self._admitted(link, connection)
        if peer is not None and self._has_room(connection, peer.uid):
            self._open[peer.uid] += 1
            session = Session(link, connection, peer, self._limits)
            clients.start_soon(self._converse, session, link)
            return
        with suppress(OSError):
            for packet in connection.pending():
                link.send_now(packet.data)
        link.hang_up()
        link.close()

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

    def _has_room(self, connection: ServerConnection[OwnedFd], uid: int) -> bool:
        found = self._crowd(uid)
        if found is None:
            return True
        kind, crowd = found
        connection.turn_away(Reason.BUSY, crowd)
        if self._crowded[kind].begins():
            log.warning("a client of user %d was turned away, as more may be: %s", uid, crowd)
        return False

    def _crowd(self, uid: int) -> tuple[Crowd, str] | None:
        """What leaves no room for one more client of this user, and the remedy; None if nothing."""
        most, here = self._limits.connections, self._open.total()
        share = max(1, most // 3)
        others = here - sum(self._open[own] for own in self._own)
        if here >= most:
            kind, crowd = Crowd.ALL, f"{here} clients are connected already"
        elif uid in self._own:
            return None
        elif self._open[uid] >= share:
            kind = Crowd.USER
            crowd = f"user {uid} has {self._open[uid]} connections already, as many as one may have"
        elif others >= most - share:
            kind = Crowd.OTHERS
            crowd = f"{others} clients are connected already, and the rest is kept for the daemons"
        else:
            return None
        return kind, f"{crowd}: try again, or end some (root finds them with `ss -xp`)"

    async def _converse(self, session: Session, link: Link) -> None:
        try:
            await self._handler(session)
            await session.end()
        except Exception as error:
            log.exception("%s was hung up on, because answering it failed", session)
            await session.end(error)
        finally:
            link.close()
            self._open[session.peer.uid] -= 1
