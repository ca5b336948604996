"""What another program answers, for those who have an event loop to turn meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio

from preloadd.linux.asking import END_S, Answer, Asked
from preloadd.linux.notify import without_manager


async def answer(command: Sequence[str], environ: Mapping[str, str]) -> Answer:
    """How `command` ended and the end of its standard output; its standard error is this process's.

    Cancelling kills it and all that it started; nobody waits for one that cannot be killed. OSError
    if the system refuses another process; a command that cannot be executed is not `started`.
    """
    with Asked(command, without_manager(environ)) as asked:
        try:
            while True:
                await anyio.wait_readable(asked)
                if (told := asked.hear()) is not None:
                    return told
        finally:
            asked.kill()
            with anyio.move_on_after(END_S, shield=True):
                await anyio.wait_readable(asked.child)
