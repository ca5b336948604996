"""The way into a device's memory: a ring of pinned buffers, each with its own queue of copies.

A thread that writes takes the buffer that has been free longest, waits until the device has taken
what it held before, has it filled, and queues one copy. So reading and copying overlap, and a
device slower than the disk holds the readers back without any other bookkeeping.

Buffers are pinned in the background from the moment the ring exists: pinning costs about 0.2 s a
GiB, and nobody waits for more than the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from preloadd.linux.owner import Owner
from preloadd.linux.threads import starting
from preloadd.memory.api import Rows
from preloadd.memory.pinned import Pinned

PINNERS = 4
"""Threads that pin at once. What they do in parallel is the clearing of pages."""


class Copies(Protocol):
    """Of a device, what staging needs. All but `current` is called inside `with current():`."""

    def current(self) -> AbstractContextManager[object]:
        """Make the device this thread's, and give the thread back the one it had; may be nested."""

    def pin(self, nbytes: int) -> Pinned:
        """Host memory the device copies from by itself; starts at a multiple of ALIGNED."""

    def unpin(self, pinned: Pinned) -> None:
        """Give it back. No copy from it may be under way, no view of it alive."""

    def open_queue(self) -> int:
        """A queue of copies, which are done in order. Queues are independent of each other."""

    def close_queue(self, queue: int) -> None:
        """Give the queue up; nothing may be in it."""

    def copy_rows_in(self, target: int, source: int, rows: Rows, queue: int) -> None:
        """Queue one copy of `rows` of the pinned span at `source` to `target`, packed."""

    def wait(self, queue: int) -> None:
        """Until everything in the queue is done; DeviceFailed if something could not be."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """One buffer of the ring and the queue of the copies out of it."""

    pinned: Pinned
    queue: int


class Ring(Owner):
    """`count` pinned buffers of `nbytes` for any number of threads. Owns buffers and queues.

    PreloadError if there is no thread to pin them.
    """

    def __init__(self, device: Copies, *, count: int, nbytes: int) -> None:
        self._device = device
        self._count, self._nbytes = count, nbytes
        self._slots: list[_Slot] = []
        self._free: SimpleQueue[_Slot | Exception] = SimpleQueue()
        self._failures = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(min(PINNERS, count), thread_name_prefix="pinning")
        with ExitStack() as undo, starting("pinning host memory"):
            undo.callback(self.close)
            for _ in range(count):
                self._pool.submit(self._pin)
            undo.pop_all()

    def write(
        self, target: int, span: int, rows: Rows, read: Callable[[memoryview], object]
    ) -> None:
        """Have `read` fill a buffer of `span` bytes, and queue the copy of `rows` to `target`.

        Blocks while no buffer is free. Raises what `read` does, and DeviceFailed or OutOfRoom.
        """
        if span > self._nbytes:
            raise ValueError(f"a span of {span} bytes, buffers have {self._nbytes}")
        slot = self._take()
        try:
            with self._device.current():
                self._device.wait(slot.queue)
                with slot.pinned.view[:span] as window:
                    read(window)
                if rows.total:
                    self._device.copy_rows_in(target, slot.pinned.address, rows, slot.queue)
        finally:
            self._free.put(slot)

    def drain(self) -> None:
        """Wait until every copy queued so far has arrived; DeviceFailed if one could not."""
        with self._lock:
            slots = list(self._slots)
        with self._device.current():
            for slot in slots:
                self._device.wait(slot.queue)

    def close(self) -> None:
        """Wait for what is queued, then give up all buffers and queues. No thread may write."""
        self._pool.shutdown(cancel_futures=True)
        slots, self._slots = self._slots, []
        if slots:
            with self._device.current(), ExitStack() as stack:
                for slot in slots:
                    stack.callback(self._device.unpin, slot.pinned)
                    stack.callback(self._device.close_queue, slot.queue)
                    stack.callback(self._device.wait, slot.queue)

    def _pin(self) -> None:
        """One more buffer, or the reason why there is none."""
        try:
            with self._device.current(), ExitStack() as undo:
                pinned = self._device.pin(self._nbytes)
                undo.callback(self._device.unpin, pinned)
                slot = _Slot(pinned, self._device.open_queue())
                undo.pop_all()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for a buffer
            self._free.put(error)
            return
        with self._lock:
            self._slots.append(slot)
        self._free.put(slot)

    def _take(self) -> _Slot:
        """A free buffer. Those that could not be pinned are done without, unless all could not."""
        while True:
            got = self._free.get()
            if isinstance(got, _Slot):
                return got
            with self._lock:
                self._failures += 1
                none = self._failures >= self._count
            if none:
                self._free.put(got)  # for the threads that wait as well
                raise got
