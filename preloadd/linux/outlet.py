"""Text for people that is written without waiting: a terminal may be stopped, a pipe's reader hang.

A thread writes. To look for room first would not do: processes share a pipe, and another one may
have filled it by the time of the write, which then waits for whoever does not read.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MOST_WAITING = 1 << 18
"""Bytes that may wait until they are read; lines beyond are lost, and counted."""

FLUSH_S = 1.0
"""Seconds that what waits may take once its stream is closed; the last half is for the last entry
alone."""


def outlet(stream: TextIO) -> TextIO:
    """A stream to where the borrowed `stream` leads: writing to it neither waits nor fails.

    Closing it waits a moment for what is still to be written: first for all of it, then for what
    was written last and a line on how much is lost before that. It drops what is not read by then.
    """
    return io.TextIOWrapper(
        _Outlet(stream.fileno()),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="",
        write_through=True,
    )


class _Outlet(io.BufferedIOBase):
    """Writes to a borrowed descriptor, from a thread that the first write starts."""

    name = "<outlet>"

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: deque[bytes] = deque()
        self._nbytes = 0
        self._lost = 0
        self._last = b""
        self._busy = False
        self._ends = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Have `data` written after all before it; what finds no room is counted as lost."""
        entry = bytes(data)
        with self._changed:
            self._last = entry
            if self._lost or (self._waiting and self._nbytes + len(entry) > MOST_WAITING):
                self._lost += _lines(entry)
            else:
                self._waiting.append(entry)
                self._nbytes += len(entry)
            self._changed.notify_all()
            if self._thread is None:
                self._start()
        return len(entry)

    def flush(self) -> None:
        """Return at once: whatever was written is on its way."""

    def close(self) -> None:
        """Wait a moment until all is written, or else the last words; drop the rest."""
        with self._changed:
            if not self._settles():
                self._shorten()
                self._settles()
            self._ends = True
            self._waiting.clear()
            self._lost = 0
            self._changed.notify_all()
        super().close()

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The borrowed descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Whether it leads to a terminal."""
        return os.isatty(self._fd)

    @property
    def _pending(self) -> bool:
        return bool(self._waiting or self._lost)

    def _settles(self) -> bool:
        """Whether all is written within a moment."""
        return self._changed.wait_for(lambda: not (self._busy or self._pending), FLUSH_S / 2)

    def _shorten(self) -> None:
        """Leave what was written last, if that is among what waits or is lost; lose the rest."""
        if not self._pending:
            return
        lost = self._lost + sum(map(_lines, self._waiting)) - _lines(self._last)
        self._waiting = deque([_loss(lost), self._last] if lost else [self._last])
        self._nbytes = sum(map(len, self._waiting))
        self._lost = 0

    def _start(self) -> None:
        # Not one that is waited for when the interpreter ends: it may wait for ever itself.
        self._thread = threading.Thread(target=self._work, name="outlet", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are no more; the next line may have one
            self._thread = None
            while self._pending:
                self._put(self._take())

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ends or self._pending)
                if not self._pending:
                    return
                entry = self._take()
                self._busy = True
            self._put(entry)

    def _take(self) -> bytes:
        """What is to be written next: what is lost is told after all that came before it."""
        if self._waiting:
            entry = self._waiting.popleft()
            self._nbytes -= len(entry)
            return entry
        lost, self._lost = self._lost, 0
        return _loss(lost)

    def _put(self, entry: bytes) -> None:
        with suppress(OSError):  # who read is gone, or the disk is full
            rest = memoryview(entry)
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:  # by the choice of another process that has it as well
                    room = select.poll()
                    room.register(self._fd, select.POLLOUT)
                    room.poll()


def _lines(entry: bytes) -> int:
    return max(1, entry.count(b"\n"))


def _loss(lines: int) -> bytes:
    return f"preloadd: lines lost here, which nobody read in time: {lines}\n".encode()
