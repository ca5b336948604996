"""Who may say what when, without any I/O: the daemon's and the client's end of one connection.

Both are generic in the handle type, so that tests use strings and drivers descriptors. Handles are
looked at, never kept: those that came with a packet stay the caller's unless the message returned
for it carries them, which of all messages only `Granted` and `WarmupTold` do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Self, TypeVar

from preloadd.domain.ids import LeaseId, generation_id, lease_id
from preloadd.domain.manifest import MAX_CHUNKS
from preloadd.errors import ErrorCode, PreloadError, ProtocolViolation
from preloadd.protocol import codec, payload
from preloadd.protocol.messages import (
    MAX_WARMUP,
    Attach,
    Done,
    Granted,
    Load,
    Memory,
    MemoryHeld,
    Mismatched,
    NotAvailable,
    Profiling,
    Reason,
    Refused,
    Release,
    Reply,
    Request,
    StateChanged,
    Status,
    StatusTold,
    WarmupAsked,
    WarmupTold,
    Watch,
)

H = TypeVar("H")

MAX_WAITING = 8
"""Requests of one connection that may wait for their answers."""

_ANSWERS: dict[type[Request], tuple[type[Reply], ...]] = {
    Attach: (Granted, Mismatched),
    Memory: (MemoryHeld, Mismatched),
    Release: (Done,),
    Load: (Done,),
    Profiling: (Done,),
    Status: (StatusTold,),
    Watch: (StateChanged,),
    WarmupAsked: (WarmupTold,),
}
_ALWAYS = (NotAvailable, Refused)
_UNTOLD = "the daemon failed at this request; its log says why"


class Phase(StrEnum):
    """What a connection is. NEW has said nothing valid yet; LEASED is itself the lease."""

    NEW = "new"
    IDLE = "idle"
    LEASED = "leased"
    WATCHING = "watching"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Outgoing(Generic[H]):
    """One packet to send. Its handles are borrowed: who gave them keeps them open until then."""

    data: bytes
    handles: tuple[H, ...] = ()


class _Connection:
    """What both ends keep: the phase, and the requests that wait for answers, oldest first."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.waiting: deque[Request] = deque()
        self.lease: LeaseId | None = None

    def receive_eof(self) -> None:
        """The peer is gone; nothing more is due to it or expected from it."""
        self.phase = Phase.CLOSED
        self.waiting.clear()

    def _asks(self) -> str:
        return codec.tag(self.waiting[0]) if self.waiting else "no request"

    def _asked(self, request: Request) -> None:
        """Note a request that goes out or came in; ProtocolViolation where it has no place."""
        name = codec.tag(request)
        changes = isinstance(request, (Attach, Watch))
        if self.phase in (Phase.WATCHING, Phase.CLOSED):
            raise ProtocolViolation(f"{name} on a connection that is {self.phase}")
        if changes and self.phase is Phase.LEASED:
            raise ProtocolViolation(f"{name} on a connection that is a lease: open another one")
        if self.waiting and (changes or isinstance(self.waiting[0], (Attach, Watch))):
            raise ProtocolViolation(f"{name} beside {codec.tag(self.waiting[0])}: ask one by one")
        if len(self.waiting) >= MAX_WAITING:
            raise ProtocolViolation(f"more than {MAX_WAITING} requests without their answers")
        self.waiting.append(request)
        if self.phase is Phase.NEW:
            self.phase = Phase.IDLE

    def _answered(self, reply: Reply) -> bool:
        """Note the answer to the oldest request; False if it is none."""
        if isinstance(reply, StateChanged) and self.phase is Phase.WATCHING:
            return True
        if not self.waiting or not isinstance(reply, (*_ANSWERS[type(self.waiting[0])], *_ALWAYS)):
            return False
        request = self.waiting.popleft()
        match reply:
            case Granted():
                self.phase, self.lease = Phase.LEASED, lease_id(reply.lease)
            case StateChanged():
                self.phase = Phase.WATCHING
            case Done() if isinstance(request, Release):
                self.phase, self.lease = Phase.IDLE, None
            case _:
                pass
        return True


class ServerConnection(_Connection, Generic[H]):
    """The daemon's end. It never raises for what a peer does: a violation is answered and ends it.

    `deadline` is the monotonic time in seconds by which the first request must have come.
    """

    def __init__(self, *, deadline: float = math.inf) -> None:
        super().__init__(Phase.NEW)
        self.violation: ProtocolViolation | None = None
        self._deadline = deadline
        self._outgoing: list[Outgoing[H]] = []

    @classmethod
    def resumed_lease(cls, lease: LeaseId) -> Self:
        """A connection that was granted `lease` by an earlier daemon, and was parked since."""
        connection = cls()
        connection.phase, connection.lease = Phase.LEASED, lease
        return connection

    @property
    def deadline(self) -> float:
        """When to call `expire`; infinite once the client has spoken."""
        return self._deadline if self.phase is Phase.NEW else math.inf

    def expire(self, now: float) -> None:
        """Hang up on a client that has said nothing up to its deadline."""
        if now >= self.deadline:
            self.abort(ProtocolViolation("no request came in time"))

    def receive(self, data: bytes, handles: Sequence[H] = ()) -> list[Request]:
        """The requests in one packet: one, or none after a violation (kept in `violation`).

        The handles stay the caller's to close: no request carries any.
        """
        if self.phase is Phase.CLOSED:
            return []
        try:
            return [self._checked(data, handles)]
        except ProtocolViolation as violation:
            self.abort(violation)
            return []

    def answer(self, reply: Reply, handles: Sequence[H] = ()) -> None:
        """Answer the oldest request that has no answer yet, or tell a watching client of a change.

        Only `Granted` (the manifest's, then every chunk's) and `WarmupTold` (one for each name)
        have handles, borrowed until sent.
        ValueError for an answer to something else, a fault of ours. A client that is gone by now is
        not answered.
        """
        if self.phase is Phase.CLOSED:
            return
        fault = reply_fault(reply, len(handles))
        if fault:
            raise ValueError(f"{codec.tag(reply)}: {fault}")
        data = codec.encode(reply)
        if not self._answered(reply):
            raise ValueError(f"{self._asks()} is answered with {codec.tag(reply)}")
        self._outgoing.append(Outgoing(data, tuple(handles)))

    def turn_away(self, reason: Reason, detail: str) -> None:
        """Tell a client that there is no room for it, whatever it is about to ask, and close."""
        self._close(NotAvailable(reason=reason, detail=detail))

    def abort(self, error: Exception) -> None:
        """Tell the client that `error` ends the connection, and close.

        Texts of our own errors are meant for people and travel; of others nothing is told.
        """
        if isinstance(error, ProtocolViolation):
            self.violation = error
        if isinstance(error, PreloadError):
            self._close(Refused(code=error.code, detail=str(error)))
        else:
            self._close(Refused(code=ErrorCode.INTERNAL, detail=_UNTOLD))

    def pending(self) -> list[Outgoing[H]]:
        """What is to be sent now, in order; each packet is handed out once."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _checked(self, data: bytes, handles: Sequence[H]) -> Request:
        if handles:
            raise ProtocolViolation(f"no request carries descriptors; this one: {len(handles)}")
        request = codec.decode_request(data)
        self._asked(request)
        return request

    def _close(self, farewell: NotAvailable | Refused) -> None:
        if self.phase is not Phase.CLOSED:
            self._outgoing.append(Outgoing(codec.encode(farewell)))
            self.receive_eof()


class ClientConnection(_Connection, Generic[H]):
    """A client's end: one request at a time, and every answer is distrusted."""

    def __init__(self) -> None:
        super().__init__(Phase.IDLE)

    def request(self, message: Request) -> Outgoing[H]:
        """The packet that asks `message`; ProtocolViolation if it has no place or is too long."""
        if self.waiting:
            raise ProtocolViolation(f"{self._asks()} has no answer yet")
        data = codec.encode(message)
        self._asked(message)
        return Outgoing(data)

    def receive(self, data: bytes, handles: Sequence[H] = ()) -> Reply:
        """The answer (or, when watching, the event) in one packet.

        The handles are the caller's, those of a `Granted` or `WarmupTold` proven to be as many as
        it needs. ProtocolViolation closes the connection.
        """
        try:
            return self._checked(data, handles)
        except ProtocolViolation:
            self.receive_eof()
            raise

    def _checked(self, data: bytes, handles: Sequence[H]) -> Reply:
        if self.phase is Phase.CLOSED:
            raise ProtocolViolation("a packet on a closed connection")
        reply = codec.decode_reply(data)
        fault = reply_fault(reply, len(handles))
        if fault:
            raise ProtocolViolation(f"the daemon's {codec.tag(reply)}: {fault}")
        if not self.waiting and isinstance(reply, _ALWAYS):
            self.receive_eof()
        elif not self._answered(reply):
            raise ProtocolViolation(f"the daemon answered {self._asks()} with {codec.tag(reply)}")
        return reply


def reply_fault(reply: Reply, handles: int) -> str | None:
    """What is wrong with a reply that comes with so many handles, or None."""
    match reply:
        case Granted():
            return _grant_fault(reply, handles)
        case WarmupTold():
            return _warmup_fault(reply, handles)
        case _ if handles:
            return f"descriptors where none belong: {handles}"
        case MemoryHeld() if reply.nbytes < 0:
            return f"{reply.nbytes} bytes"
        case _:
            return None


def _grant_fault(granted: Granted, handles: int) -> str | None:
    if not 1 <= len(granted.chunks) <= MAX_CHUNKS:
        return f"{len(granted.chunks)} chunks; 1 to {MAX_CHUNKS} are possible"
    if handles != 1 + len(granted.chunks):
        return f"{handles} descriptors for a manifest and {len(granted.chunks)} chunks"
    if min(granted.chunks) <= 0 or not 0 < granted.manifest <= payload.MAX_NBYTES:
        return f"a manifest of {granted.manifest} bytes, chunks of {min(granted.chunks)} or more"
    try:
        generation_id(granted.generation)
        lease_id(granted.lease)
    except ValueError as error:
        return codec.cut(str(error))
    return None


def _warmup_fault(told: WarmupTold, handles: int) -> str | None:
    names, sizes = len(told.names), len(told.sizes)
    if names != len(set(told.names)) or not names == sizes == handles:
        return f"{handles} descriptors and {sizes} sizes for {names} names"
    if names > MAX_WARMUP:
        return f"{names} files; at most {MAX_WARMUP} are possible"
    return None if min(told.sizes, default=1) > 0 else "a file without bytes"
