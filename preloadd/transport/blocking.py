"""The blocking driver of the protocol: for engines, the CLI and loaders."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from preloadd.errors import AccessDenied, PreloadError, Unavailable
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.linux.owner import Owner
from preloadd.linux.seqpacket import Packet, Pressure
from preloadd.protocol import codec
from preloadd.protocol.connection import ClientConnection
from preloadd.protocol.messages import (
    MAX_PACKET,
    NotAvailable,
    Refused,
    Reply,
    Request,
    StateChanged,
    Watch,
)

_PAUSE = 0.01

Check = Callable[[socket.socket], None]
"""Looks at who listens before anything is sent; raises to refuse."""


class Answer(NamedTuple):
    """A reply, and the descriptors that came with it, which are the receiver's to close."""

    reply: Reply
    fds: tuple[OwnedFd, ...]


class Link:
    """Packets over one connected socket, which it owns. Deadlines are monotonic times."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes, fds: Sequence[OwnedFd] = (), *, deadline: float = math.inf) -> None:
        """Send one packet with borrowed descriptors. TimeoutError; OSError if the peer is gone."""
        numbers = [fd.fileno() for fd in fds]
        while True:
            self._wait_until(deadline)
            try:
                return seqpacket.send(self._sock, data, numbers)
            except OSError as error:
                if seqpacket.pressure(error) is not Pressure.PAUSE:
                    raise
            time.sleep(_PAUSE)

    def receive(self, *, deadline: float = math.inf) -> Packet:
        """The next packet (`eof` at the end), whose descriptors are the caller's. TimeoutError.

        ProtocolViolation and OutOfDescriptors as of `seqpacket.receive`: that packet is lost.
        """
        while True:
            self._wait_until(deadline)
            # Of a peer that hung up without reading everything the kernel says so once, and only
            # then hands out what that peer has sent, which tells why.
            with suppress(ConnectionResetError):
                return seqpacket.receive(self._sock, MAX_PACKET)

    def fileno(self) -> int:
        """The socket, still owned by this object."""
        return self._sock.fileno()

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def _wait_until(self, deadline: float) -> None:
        """Make the next call on the socket wait no longer; signals do not shorten the wait."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(None if remaining == math.inf else remaining)


class Client(Owner):
    """One connection to a daemon, which it owns. After an error that is raised it is closed.

    Once a lease was granted, the connection is the lease: it lasts until `close`.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._link = Link(sock)
        self._name = name
        self._connection = ClientConnection[OwnedFd]()

    def call(self, request: Request, *, timeout: float) -> Answer:
        """Ask, and wait for the answer, which may well be a refusal.

        Unavailable if the daemon hung up or kept silent, ProtocolViolation if it misbehaved.
        """
        deadline = time.monotonic() + timeout
        with self._closed_on_errors():
            outgoing = self._connection.request(request)
            try:
                # A daemon that has hung up already may have said why.
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._link.send(outgoing.data, deadline=deadline)
                return self._receive(deadline)
            except TimeoutError as error:
                raise Unavailable(
                    "absent",
                    f"the daemon at {self._name} did not answer {codec.tag(request)} within "
                    f"{timeout:g} s: see its log, and restart it if it hangs",
                ) from error

    def watch(self, *, timeout: float) -> None:
        """Ask to be told of every change; the first `event`, which comes at once, is the state now.

        Unavailable if the daemon takes nothing.
        """
        with self._closed_on_errors():
            outgoing = self._connection.request(Watch())
            try:
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._link.send(outgoing.data, deadline=time.monotonic() + timeout)
            except TimeoutError as error:
                raise Unavailable("absent", f"the daemon at {self._name} does not read") from error

    def event(self, *, timeout: float = math.inf) -> StateChanged | None:
        """The next change, after a `Watch` was asked; None if there is none within `timeout`.

        Unavailable when the daemon hangs up, or turns this client away.
        """
        with self._closed_on_errors():
            try:
                reply = self._receive(time.monotonic() + timeout).reply
            except TimeoutError:
                return None
            if isinstance(reply, StateChanged):
                return reply
            why = reply.detail if isinstance(reply, (NotAvailable, Refused)) else codec.tag(reply)
            reason = reply.reason if isinstance(reply, NotAvailable) else "absent"
            raise Unavailable(reason, f"the daemon at {self._name} tells no more: {why}")

    def fileno(self) -> int:
        """The socket, still owned by this object."""
        return self._link.fileno()

    def close(self) -> None:
        """Hang up, and so end the lease if there is one."""
        self._connection.receive_eof()
        self._link.close()

    def _receive(self, deadline: float) -> Answer:
        packet = self._link.receive(deadline=deadline)
        if packet.eof:
            raise Unavailable(
                "absent",
                f"the daemon at {self._name} hung up: it ended or was restarted, see its log",
            )
        with ExitStack() as undo:
            undo.callback(packet.close)
            reply = self._connection.receive(packet.data, packet.fds)
            undo.pop_all()
        return Answer(reply, packet.fds)

    @contextmanager
    def _closed_on_errors(self) -> Iterator[None]:
        """After an error a late answer could be taken for that to the next request."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def connect(path: Path, *, timeout: float, check: Check | None = None) -> Client:
    """Connect to the daemon at `path`. Unavailable with reason `absent`, AccessDenied, ConfigError.

    OutOfDescriptors if this process may open no more files, and whatever `check` raises.
    """
    try:
        sock = seqpacket.connect(path, timeout=timeout)
    except OSError as error:
        raise not_connected(path, error, timeout) from error
    with ExitStack() as undo:
        undo.callback(sock.close)
        if check is not None:
            check(sock)
        undo.pop_all()
    return Client(sock, str(path))


def not_connected(path: Path, error: OSError, timeout: float) -> PreloadError:
    """What it means that connecting to the daemon at `path` failed after `timeout` seconds."""
    if is_exhausted(error):
        return exhausted(error, f"connecting to {path}")
    match error:
        case FileNotFoundError() | NotADirectoryError():
            why = f"no daemon serves there: there is no socket {path}; start one"
        case ConnectionRefusedError():
            why = f"nobody listens on {path}: its daemon has ended; start it again"
        case PermissionError():
            return AccessDenied(
                f"user {os.geteuid()} may not connect to {path}: list the user in the daemon's "
                "access.users or one of its groups in access.groups"
            )
        case TimeoutError():
            why = f"the daemon at {path} took no connection within {timeout:g} s: see its log"
        case _:
            why = f"{path} is no socket of a preloadd daemon: {error.strerror}"
    return Unavailable("absent", why)
