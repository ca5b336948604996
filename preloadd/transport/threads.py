"""Blocking work beside the event loop, on what may hang: a disk, a device, a service manager."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from typing import TypeVar

import anyio
import anyio.lowlevel

from preloadd.errors import PreloadError
from preloadd.linux.threads import starting

T = TypeVar("T")

MOST = 4
"""Calls that may hang, before no more are made of what they were made of."""


class Overdue(TimeoutError):
    """A call did not return in the time that it was given."""


class Threads:
    """Threads for calls of `what`, in the words of an error: one for each, left behind if need be.

    A call that hangs in the kernel cannot be ended. anyio's own threads would keep the process from
    ending then, for it waits for them; and each call that is given up would cost another one.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._left: list[threading.Thread] = []

    async def run(self, work: Callable[[], T], *, within: float = inf) -> T:
        """What blocking `work` returns, or raises; once this is cancelled, nobody learns of it.

        Overdue, which says so, if it does neither `within` so many seconds. OSError without a
        call while `MOST` that were given up have not returned, or if the system gives no thread.
        """
        with anyio.move_on_after(within):
            return await self._answer(work)
        raise Overdue(f"{self._what} did not answer within {within:g} s")

    async def _answer(self, work: Callable[[], T]) -> T:
        await anyio.lowlevel.checkpoint()
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= MOST:
            raise OSError(
                f"{self._what} still does not answer {len(self._left)} earlier calls: it is asked "
                "again once one of them returns"
            )
        loop, done = asyncio.get_running_loop(), anyio.Event()
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
                answer.set_exception(error)
            with suppress(RuntimeError):  # the loop is closed by now: nobody waits
                loop.call_soon_threadsafe(done.set)

        thread = self._start(call)
        try:
            await done.wait()
        except BaseException:
            self._left.append(thread)
            raise
        return answer.result()

    def _start(self, call: Callable[[], None]) -> threading.Thread:
        doing = f"asking {self._what}"
        thread = _Call(target=call, name=doing, daemon=True)
        try:
            with starting(doing):
                thread.start()
        except PreloadError as error:
            raise OSError(str(error)) from error  # as of all else that cannot be had of it
        return thread


def settle(within: float) -> None:
    """Let calls that are still made come to their end, for so many seconds in all: what one writes
    is then there or not, and never half. To be called where no event loop runs any more."""
    until = time.monotonic() + within
    for thread in threading.enumerate():
        if isinstance(thread, _Call):
            thread.join(max(0.0, until - time.monotonic()))


class _Call(threading.Thread):
    """One call."""
