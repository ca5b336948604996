"""Hearing a peer over a wire, while what is posted to it goes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio

from preloadd.errors import ProtocolViolation
from preloadd.protocol.rendezvous.frames import Frames
from preloadd.transport import tcp

M = TypeVar("M")


async def hear(wire: tcp.Wire, decode: Callable[[bytes], M], take: Callable[[M], None]) -> str:
    """Have `take` get what a peer says, until it breaks the rules or hangs up; which of them.

    What still comes once this side has finished is for nobody. It is read all the same: a socket
    that is closed with something unread takes from the peer what was said to it last.
    """
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.write)
        why = await _heard(wire, decode, take)
        tasks.cancel_scope.cancel()
    return why


async def _heard(wire: tcp.Wire, decode: Callable[[bytes], M], take: Callable[[M], None]) -> str:
    frames = Frames()
    try:
        while data := await wire.receive():
            for frame in () if wire.finished else frames.receive(data):
                take(decode(frame))
                if wire.finished:
                    break
    except ProtocolViolation as error:
        return f"broke the protocol: {error}"
    except OSError as error:
        return f"hung up ({error.strerror})"
    return "hung up"
