"""Ending a child process and all that it has started, while the event loop turns."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio

from preloadd.linux.process import Child
from preloadd.transport.aio import Link

_GONE_S = 5.0
_POLL_S = 0.01


async def stop(child: Child, grace: float) -> int:
    """Ask a child to end, and after `grace` seconds have it and its group killed; its status.

    For what a broken disk or driver keeps from being killed it waits without end, but for what is
    left of the group a moment only: ask the child whether that is gone.
    """
    if child.poll() is None:
        child.signal(signal.SIGTERM)
        with anyio.move_on_after(grace):
            await anyio.wait_readable(child)
        child.kill_group()
        await anyio.wait_readable(child)
    status = child.wait()
    with anyio.move_on_after(_GONE_S):
        while not child.group_gone():  # noqa: ASYNC110 - nothing tells of the end of a group
            await anyio.sleep(_POLL_S)
    return status


@contextmanager
def heard_to_its_end(child: Child, link: Link) -> Iterator[None]:
    """In the block, `link` ends with what a child has said by the time it ends, whoever else has
    its end of the socket. Nothing else may wait for the child there."""
    loop, number = asyncio.get_running_loop(), child.fileno()

    def hang_up() -> None:
        loop.remove_reader(number)
        with suppress(OSError):  # the other end is closed as well
            link.socket.shutdown(socket.SHUT_RD)

    loop.add_reader(number, hang_up)
    try:
        yield
    finally:
        loop.remove_reader(number)
