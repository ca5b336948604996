"""What a store and the process that does its work say to each other: one request, one reply.

Each is a head of fixed size and what it announces. Whoever waits says until when.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

_REQUEST = struct.Struct("!BdQHQ")
_REPLY = struct.Struct("!BQ")
_PIECE = 1 << 20


class Verb(IntEnum):
    """What is asked for. `OPEN`, once and first, with the configuration as value, and the seconds
    after which a process that is asked nothing is to leave its pool."""

    OPEN = 1
    FIND = 2
    KEEP = 3
    REPLACE = 4


class Outcome(IntEnum):
    """How it went. `UNFIT`: this will never work here; `REFUSED`: not with this key or value;
    `DOWN`: not now. These three come with the reason, `FOUND` with the value."""

    DONE = 1
    FOUND = 2
    MISSING = 3
    UNFIT = 4
    REFUSED = 5
    DOWN = 6


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, with as many seconds as are left for it. `limit` bounds what is found."""

    verb: Verb
    seconds: float
    key: str = ""
    limit: int = 0
    value: bytes | bytearray = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """How it went, and what there is of it."""

    outcome: Outcome
    body: bytes | bytearray | memoryview = b""

    @property
    def text(self) -> str:
        """The reason."""
        return bytes(self.body).decode(errors="replace")


def send_request(sock: socket.socket, request: Request, until: float) -> None:
    """TimeoutError once `until` is over, OSError if nobody is there."""
    key = request.key.encode()
    head = _REQUEST.pack(request.verb, request.seconds, request.limit, len(key), len(request.value))
    _send(sock, head + key, until)
    _send(sock, request.value, until)


def receive_request(sock: socket.socket, until: float | None = None) -> Request:
    """EOFError if the other side has hung up; TimeoutError if nothing is asked `until` then."""
    head = _receive(sock, _REQUEST.size, until)
    verb, seconds, limit, key, value = _REQUEST.unpack(head)
    told = _receive(sock, key, None).decode()
    return Request(Verb(verb), seconds, told, limit, _receive(sock, value, None))


def send_reply(sock: socket.socket, reply: Reply) -> None:
    """OSError if nobody is there."""
    _send(sock, _REPLY.pack(reply.outcome, len(reply.body)), None)
    _send(sock, reply.body, None)


def receive_reply(sock: socket.socket, limit: int, until: float) -> Reply:
    """TimeoutError, EOFError, or OSError for what is no reply, or longer than `limit`."""
    outcome, nbytes = _REPLY.unpack(_receive(sock, _REPLY.size, until))
    if nbytes > limit or outcome not in set(Outcome):
        raise OSError(f"a reply {outcome} of {nbytes:,} bytes")
    return Reply(Outcome(outcome), _receive(sock, nbytes, until))


def _send(sock: socket.socket, data: bytes | bytearray | memoryview, until: float | None) -> None:
    left = memoryview(data)
    while left:
        _wait(sock, until)
        left = left[sock.send(left[:_PIECE]) :]


def _receive(sock: socket.socket, nbytes: int, until: float | None) -> bytearray:
    data = bytearray(nbytes)
    left = memoryview(data)
    while left:
        _wait(sock, until)
        got = sock.recv_into(left)
        if not got:
            raise EOFError("the other side has hung up")
        left = left[got:]
    return data


def _wait(sock: socket.socket, until: float | None) -> None:
    """Have the next call on `sock` wait no longer."""
    if until is None:
        sock.settimeout(None)
        return
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)
