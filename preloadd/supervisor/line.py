"""One connection to a rank, over which it is asked again and again how it is."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Self

import anyio.to_thread

from preloadd.errors import Unavailable
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.locks import FILE_NAME, holder
from preloadd.linux.owner import Owner
from preloadd.protocol.connection import ClientConnection
from preloadd.protocol.messages import Reason, Status, StatusTold
from preloadd.transport.aio import Link
from preloadd.transport.blocking import not_connected
from preloadd.transport.status import status_of
from preloadd.transport.unheard import Unheard, unheard

HIDDEN = "hidden"
"""The reason why a rank is unavailable that serves behind a socket which was removed."""


class Line(Owner):
    """Owns a connected socket. After an error it can only be closed."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self._link = Link(sock)
        self._connection = ClientConnection[OwnedFd]()
        self._path = path

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Connect at once. Unavailable with reason BUSY if the rank accepts no connection, STARTING
        if its daemon runs and listens nowhere, as while it loads, or HIDDEN.

        Otherwise PreloadError as of `transport.blocking.connect`.
        """
        try:
            sock = seqpacket.connect(path, timeout=0)
        except TimeoutError as error:
            raise Unavailable(
                Reason.BUSY,
                f"stuck: the daemon at {path} accepts no connection: see its log, and restart it "
                "if it hangs",
            ) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            # A host may have so many sockets that to go through them takes a while.
            why = await anyio.to_thread.run_sync(_unheard, path, abandon_on_cancel=True)
            raise why or not_connected(path, error, 0) from error
        except OSError as error:
            raise not_connected(path, error, 0) from error
        return cls(sock, path)

    @property
    def is_found(self) -> bool:
        """Whether there is a socket still where others would look for this rank's."""
        return os.path.lexists(self._path)

    async def ask(self) -> None:
        """Send the question. Unavailable if the rank has gone."""
        try:
            await self._link.send(self._connection.request(Status()).data)
        except OSError as error:
            raise self._gone() from error

    async def answer(self) -> StatusTold:
        """Wait for the answer, without limit; may be cancelled and called again.

        Unavailable if the rank has gone or has no room, AccessDenied, ProtocolViolation.
        """
        packet = await self._link.receive()
        try:
            if packet.eof:
                raise self._gone()
            reply = self._connection.receive(packet.data, packet.fds)
        finally:
            packet.close()
        return status_of(reply, self._path)

    def close(self) -> None:
        """Hang up."""
        self._link.close()

    def _gone(self) -> Unavailable:
        return Unavailable(
            "absent", f"the daemon at {self._path} hung up: it ended or was restarted, see its log"
        )


def _unheard(path: Path) -> Unavailable | None:
    """What to raise where nobody listens though a daemon runs; None if there is none, or if that
    cannot be known."""
    try:
        pid = holder(path.parent / FILE_NAME)
    except OSError:
        return None
    if pid is None:
        return None
    found, text = unheard(path, pid)
    return Unavailable(HIDDEN if found is Unheard.HIDDEN else Reason.STARTING, text)
