"""What is known from others than the ranks: each asked in a thread of its own, where it may hang.

Nobody waits for such a thread: neither who wants to know, nor the end of this process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Generic, TypeVar

import anyio

from preloadd.domain.lines import one_line
from preloadd.errors import PreloadError
from preloadd.linux.threads import starting

log = logging.getLogger(__name__)

T = TypeVar("T")


class Source(Generic[T]):
    """Asked again and again, keeps its last answer in `value`.

    `trouble` says since when there was no answer, or why there is none; else it is empty. `known`
    is set once the first answer was dealt with, or was not there in time.
    """

    def __init__(self, name: str, ask: Callable[[], T], first: T) -> None:
        """`ask` blocks; an error that it raises is its trouble. `first` is known until it."""
        self.value = first
        self.trouble = ""
        self.known = anyio.Event()
        self._name = name
        self._ask = ask

    async def watch(
        self, heard: Callable[[], Awaitable[None]] | None, *, pause: float, overdue: float
    ) -> None:
        """Ask for ever, and call `heard` after every answer. Both times are seconds."""
        while True:
            if await self._asked(overdue) and heard is not None:
                await heard()
            self.known.set()
            await anyio.sleep(pause)

    async def _asked(self, overdue: float) -> bool:
        """Whether there was an answer; returns when there is one or an error, however late."""
        began = datetime.now(UTC)
        try:
            answer = in_thread(self._ask)
            await asyncio.wait([answer], timeout=overdue)
            if not answer.done():
                self._complain(f"{self._name}: not answering since {began:%Y-%m-%d %H:%M:%S} UTC")
                self.known.set()
            self.value = await answer
        except PreloadError as error:
            self._complain(f"{self._name}: {one_line(error)}")
            return False
        except Exception:
            # Whatever a source may find to upset this program must not end it.
            trouble = f"{self._name}: this supervisor failed to ask it: its log says why"
            if trouble != self.trouble:
                log.exception("%s: not asked", self._name)
            self._complain(trouble)
            return False
        if self.trouble:
            log.info("%s: answers again", self._name)
        self.trouble = ""
        return True

    def _complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("%s", trouble)
        self.trouble = trouble


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The outcome of `work`. PreloadError at once if there is no thread for it.

    anyio's threads would keep the process alive as long as one hangs.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where the outcome is awaited
            outcome.set_exception(error)

    with starting("asking others"):
        threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(outcome)
