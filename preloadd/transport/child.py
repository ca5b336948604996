"""What another program answers: run as a child, read to the end, reaped; nobody waits for one that
cannot be killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence

import anyio

from preloadd.linux.fds import OwnedFd
from preloadd.linux.notify import without_manager
from preloadd.linux.process import Child, spawn

LONGEST = 1 << 16
"""Bytes that are kept of an answer: the last ones."""

END_S = 2.0
"""Seconds that a killed child has to be gone. A process that waits for a driver which hangs stays
until that is over."""


async def answer(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, bytes]:
    """The exit status of `command`, 128 + n for signal n, and the end of its standard output.

    Its standard error is this process's. Cancelling kills it and all that it started. OSError if
    the system refuses another process; a command that is not there ends with 126 or 127.
    """
    answers, told = map(OwnedFd, os.pipe2(os.O_CLOEXEC))
    with answers:
        with told:
            child = spawn(
                command,
                environ=without_manager(environ),
                new_group=True,
                parent_death_signal=signal.SIGKILL,
                stdout=told.fileno(),
            )
        try:
            text = await _read_all(answers.fileno())
            await anyio.wait_readable(child)
            return child.wait(), text
        finally:
            await _end(child)


async def _end(child: Child) -> None:
    """Kill what still lives, and reap it: here, or whenever it can be."""
    if child.poll() is None:
        child.kill_group()
        with anyio.move_on_after(END_S, shield=True):
            await anyio.wait_readable(child)
    if child.poll() is None:
        threading.Thread(target=child.close, daemon=True).start()
    else:
        child.close()


async def _read_all(fd: int) -> bytes:
    """Everything until the end, of which only the end is kept."""
    kept = b""
    while True:
        # One read never blocks: there is something to read, or the end.
        await anyio.wait_readable(fd)
        piece = os.read(fd, LONGEST)
        if not piece:
            return kept
        kept = (kept + piece)[-LONGEST:]
