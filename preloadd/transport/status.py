"""One question and its answer: how is the rank behind this socket?"""

from __future__ import annotations

from pathlib import Path

from preloadd.errors import AccessDenied, ErrorCode, ProtocolViolation
from preloadd.protocol.messages import NotAvailable, Refused, Reply, Status, StatusTold
from preloadd.transport.blocking import connect


def ask_status(socket: Path, *, timeout: float) -> StatusTold:
    """What the rank at `socket` tells of itself. Blocks, `timeout` seconds for each step at most.

    Unavailable if nobody answers, AccessDenied, ProtocolViolation for any other answer.
    """
    with connect(socket, timeout=timeout) as client:
        reply = client.call(Status(), timeout=timeout).reply
    return status_of(reply, socket)


def status_of(reply: Reply, socket: Path) -> StatusTold:
    """The status in what the rank at `socket` answered to a question for it.

    AccessDenied, ProtocolViolation for any other answer.
    """
    match reply:
        case StatusTold():
            return reply
        case Refused(code=ErrorCode.DENIED):
            raise AccessDenied(reply.detail)
        case Refused() | NotAvailable():
            raise ProtocolViolation(
                f"the daemon at {socket} does not tell its status: {reply.detail}"
            )
        case _:
            raise ProtocolViolation(
                f"the daemon at {socket} answered a status request with {reply}"
            )
