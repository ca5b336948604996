"""Why and with which code the launcher ends: the first cause counts."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import anyio

from preloadd.launcher.progress import Display

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

ONE_SIGNAL = 0.5
"""Seconds within which a further signal counts as the same: wrappers pass on what a terminal has
already sent to the whole process group."""


class Ending:
    """Begins once, with the first cause. `hurried` is set by a later signal."""

    def __init__(self, display: Display) -> None:
        self.begun = anyio.Event()
        self.hurried = anyio.Event()
        self._preparing: anyio.CancelScope | None = None
        self.code = 0
        self.since = 0.0
        self._display = display

    def until(self) -> anyio.CancelScope:
        """A block in which what is awaited is cancelled once the end begins; one at a time."""
        self._preparing = anyio.CancelScope()
        if self.begun.is_set():
            self._preparing.cancel()
        return self._preparing

    def because(self, why: str, code: int) -> None:
        """Begin to end, with this exit code, unless that has begun."""
        if not self.begun.is_set():
            self.code = code
            self.since = anyio.current_time()
            self.begun.set()
            if self._preparing is not None:
                self._preparing.cancel()
            self._display.settle()
            self._display.say(f"stopping: {why}")

    async def watch(self, signals: AsyncIterator[signal.Signals]) -> None:
        """Turn signals into causes, for ever."""
        async for number in signals:
            if not self.begun.is_set():
                self.because(f"received {number.name}", 128 + number)
            elif anyio.current_time() - self.since >= ONE_SIGNAL:
                self.hurried.set()
