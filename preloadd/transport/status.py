"""One question and its answer: how is the rank behind this socket?"""

from __future__ import annotations

from pathlib import Path

from preloadd.errors import ProtocolViolation
from preloadd.protocol.messages import Status, StatusTold
from preloadd.transport.blocking import connect


def ask_status(socket: Path, *, timeout: float) -> StatusTold:
    """What the rank at `socket` tells of itself. Blocks, `timeout` seconds for each step at most.

    Unavailable if nobody answers, AccessDenied, ProtocolViolation for any other answer.
    """
    with connect(socket, timeout=timeout) as client:
        reply = client.call(Status(), timeout=timeout).reply
    if not isinstance(reply, StatusTold):
        raise ProtocolViolation(f"the daemon at {socket} answered a status request with {reply}")
    return reply
