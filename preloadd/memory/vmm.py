"""Memory of a GPU that no process owns: allocations behind descriptors, mapped where needed.

CUDA and HIP have the same calls for it, so all that is not a call of theirs is here. A chunk is one
allocation. The filler maps it for writing, engines map all chunks of an arena one after the other
into one range of addresses, read-only. The importer chooses its access: this protects against
mistakes, not against a peer that may attach and means harm.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from itertools import accumulate
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Protocol

from preloadd.domain.ids import DeviceId
from preloadd.errors import DamagedManifest, DeviceFailed
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner
from preloadd.memory.api import MAX_SPAN, PIECE, Rows
from preloadd.memory.pinned import Pinned
from preloadd.memory.staging import Copies, Ring

log = logging.getLogger(__name__)

MOST_THREADS = 16
"""More readers than this gain nothing where it was measured, and each costs pinned memory."""


class Driver(Copies, Protocol):
    """One device, by the calls we use. All but `current` and `close` inside `with current():`.

    Handles, addresses and queues are the driver's numbers. What it refuses is raised as OutOfRoom,
    OutOfDescriptors, DamagedManifest (of what is `foreign`: a peer sent it) or DeviceFailed. Giving
    up is no failure after the driver's own end.
    """

    @property
    def device(self) -> DeviceId:
        """The device's UUID with its prefix."""

    @property
    def granularity(self) -> int:
        """Sizes of allocations and mappings are multiples of this many bytes."""

    def room(self) -> tuple[int, str]:
        """Bytes that are free, and whose memory it is and who holds it (for the error text)."""

    def available(self) -> int:
        """Bytes that are free."""

    def create(self, nbytes: int) -> int:
        """Allocate; the handle keeps the memory until `release`."""

    def export(self, handle: int) -> OwnedFd:
        """A close-on-exec descriptor that keeps the memory as well."""

    def import_fd(self, fd: int) -> int:
        """A handle of the memory behind a borrowed descriptor that a peer sent."""

    def require_home(self, handle: int) -> None:
        """DamagedManifest if the memory of a handle is known to be another device's."""

    def release(self, handle: int) -> None:
        """Give the handle up. Mappings and descriptors keep the memory."""

    def reserve(self, nbytes: int, *, foreign: bool = False) -> int:
        """Addresses without memory."""

    def free(self, address: int, nbytes: int) -> None:
        """Give all addresses of a reservation up; nothing may be mapped there."""

    def map(self, address: int, nbytes: int, handle: int, *, foreign: bool = False) -> None:
        """Put memory behind reserved addresses. It keeps the memory; nobody has access yet."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Take back one `map`. The device must be done with it."""

    def allow(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Give this device access to mapped addresses."""

    def clear(self, address: int, nbytes: int) -> None:
        """Fill with zeros, and wait for it."""

    def synchronize(self) -> None:
        """Wait until the device has done all that this process asked of it."""

    def copy_out(self, address: int, nbytes: int) -> bytes:
        """A copy in host memory."""

    def copy_out_to(self, target: int, address: int, nbytes: int) -> None:
        """A copy in the pinned memory at `target`."""

    def close(self) -> None:
        """Give the device up. Nothing of it may be in use."""


class VmmFiller(Owner):
    """Makes chunks in the memory of a device. Implements `memory.api.Filler`; owns the driver.

    `threads` write with profit; they share `buffers` pinned buffers for spans of up to `longest`
    bytes. One and a half for each thread: while it fills one, a copy is under way from every
    second.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        threads: int | None = None,
        buffers: int | None = None,
        longest: int = MAX_SPAN,
    ) -> None:
        self._driver = driver
        self._threads = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        count = buffers or self._threads + (self._threads + 1) // 2
        with ExitStack() as undo:
            undo.callback(driver.close)
            self._ring = Ring(driver, count=count, nbytes=longest)
            undo.pop_all()

    @property
    def granularity(self) -> int:
        """What the driver asks for, 2 MiB mostly."""
        return self._driver.granularity

    @property
    def staged(self) -> bool:
        """True: only pinned memory is copied at full speed."""
        return True

    @property
    def threads(self) -> int:
        """One for each processor this process may use, up to MOST_THREADS."""
        return self._threads

    def room(self) -> tuple[int, str]:
        """What is free on the device; the text names it, and who holds the rest if it is known."""
        with self._driver.current():
            return self._driver.room()

    def available(self) -> int:
        """What is free on the device."""
        with self._driver.current():
            return self._driver.available()

    def writing(self) -> AbstractContextManager[object]:
        """The device is the thread's throughout, and not made so again by every write."""
        return self._driver.current()

    def create(self, nbytes: int) -> VmmChunk:
        """A zero-filled chunk, mapped for writing; OutOfRoom, OutOfDescriptors, DeviceFailed."""
        driver = self._driver
        if nbytes <= 0 or nbytes % driver.granularity:
            raise ValueError(f"{nbytes} is no positive multiple of {driver.granularity} bytes")
        with driver.current(), ExitStack() as undo:
            handle = driver.create(nbytes)
            undo.callback(_undone, driver.release, handle)
            fd = driver.export(handle)
            undo.callback(fd.close)
            address = driver.reserve(nbytes)
            undo.callback(_undone, driver.free, address, nbytes)
            driver.map(address, nbytes, handle)
            undo.callback(_undone, driver.unmap, address, nbytes)
            driver.allow(address, nbytes, writable=True)
            driver.clear(address, nbytes)
            driver.release(handle)
            undo.pop_all()
        return VmmChunk(driver, self._ring, fd, address, nbytes)

    def close(self) -> None:
        """Give up buffers, queues and the device. Chunks are closed before.

        What a lost device does not give up, the driver does when this process ends.
        """
        try:
            with ExitStack() as stack:
                stack.callback(self._driver.close)
                stack.callback(self._ring.close)
        except DeviceFailed as error:
            log.warning("%s", error)


class VmmChunk(Owner):
    """A chunk under construction. Implements `memory.api.WritableChunk`."""

    def __init__(self, driver: Driver, ring: Ring, fd: OwnedFd, address: int, nbytes: int) -> None:
        self._driver, self._ring, self._fd = driver, ring, fd
        self._address, self._nbytes = address, nbytes
        self._mapped = True

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    @property
    def fd(self) -> OwnedFd:
        """The driver's descriptor, owned by the chunk."""
        return self._fd

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes for libraries that fill device memory themselves; version 3, not read-only."""
        return _array(self._address, self._nbytes)

    def write(
        self, target: int, span: int, rows: Rows, read: Callable[[memoryview], object]
    ) -> None:
        """See `memory.api.WritableChunk`. The copy is under way when this returns."""
        if target < 0 or target + rows.total > self._nbytes:
            raise ValueError(f"no {rows.total} bytes at {target} in a chunk of {self._nbytes}")
        rows.check(span)
        self._ring.write(self._address + target, span, rows, read)

    def finish(self) -> None:
        """Wait for every copy that was queued; DeviceFailed if one did not arrive."""
        self._ring.drain()

    def close(self) -> None:
        """Unmap and close the descriptor, once nothing is copied there any more."""
        if not self._mapped:
            return
        self._mapped = False
        with self._fd, self._driver.current():
            self._ring.drain()
            self._driver.unmap(self._address, self._nbytes)
            self._driver.free(self._address, self._nbytes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A device that is lost fails here as well, which must not hide how it began.
        with suppress(DeviceFailed) if error is not None else nullcontext():
            self.close()


class VmmMapper:
    """Maps granted chunks on one device. Implements `memory.api.Mapper`; borrows the driver."""

    private = False
    """Devices have no copy-on-write."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def map(self, chunks: Sequence[tuple[OwnedFd, int]]) -> VmmMapping:
        """Map every (descriptor, size) read-only; takes and closes the descriptors, whatever comes.

        DamagedManifest if one is no memory of this device, or has fewer bytes: whether it has more
        cannot be told. OutOfRoom, OutOfDescriptors, DeviceFailed. Unmaps what was dropped before.
        """
        with ExitStack() as always:
            for fd, _ in chunks:
                always.callback(fd.close)
            _sweep()
            for _, nbytes in chunks:
                if nbytes <= 0:
                    raise DamagedManifest(f"a chunk of {nbytes} bytes")
            if not chunks:
                return VmmMapping(_Arena(self._driver, 0, ()))
            with self._driver.current():
                return self._map(chunks)

    def _map(self, chunks: Sequence[tuple[OwnedFd, int]]) -> VmmMapping:
        driver = self._driver
        sizes = tuple(nbytes for _, nbytes in chunks)
        total = sum(sizes)
        with ExitStack() as undo:
            start = address = driver.reserve(total, foreign=True)
            undo.callback(_undone, driver.free, address, total)
            for fd, nbytes in chunks:
                self._map_chunk(start, fd, nbytes, undo)
                start += nbytes
            driver.allow(address, total, writable=False)
            undo.pop_all()
        return VmmMapping(_Arena(driver, address, sizes))

    def _map_chunk(self, address: int, fd: OwnedFd, nbytes: int, undo: ExitStack) -> None:
        """Map one chunk, which `undo` undoes from then on."""
        driver = self._driver
        with ExitStack() as held:
            handle = driver.import_fd(fd.fileno())
            held.callback(_undone, driver.release, handle)
            driver.require_home(handle)
            driver.map(address, nbytes, handle, foreign=True)
            undo.callback(_undone, driver.unmap, address, nbytes)
            driver.release(handle)
            held.pop_all()


class VmmMapping:
    """The chunks of one generation, mapped read-only. Implements `memory.api.Mapping`.

    Dropped without `close`, it is unmapped at the next `map` or `close` after its last buffer is
    gone, but never while the interpreter ends: the driver may have ended before.
    """

    def __init__(self, arena: _Arena) -> None:
        self._arena = arena
        self._buffers: weakref.WeakSet[VmmBuffer] = weakref.WeakSet()
        self._lent: SimpleQueue[Pinned] = SimpleQueue()

    @property
    def writable(self) -> bool:
        """False: this process asked for no more."""
        return False

    @property
    def private_nbytes(self) -> int:
        """0: devices have no copy-on-write."""
        return 0

    def room(self) -> tuple[int, str]:
        """What is free on the device, as of `VmmFiller.room`."""
        with self._arena.driver.current():
            return self._arena.driver.room()

    def chunk(self, index: int) -> VmmBuffer:
        """The bytes of one chunk on the device."""
        buffer = VmmBuffer(self._arena, *self._arena.spans[index])
        self._buffers.add(buffer)
        return buffer

    def read(self, index: int, offset: int, nbytes: int) -> bytes:
        """A copy of some bytes of a chunk in host memory; ValueError outside of it."""
        address, size = self._arena.spans[index]
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ValueError(f"no {nbytes} bytes at {offset} in a chunk of {size}")
        with self._arena.driver.current():
            return self._arena.driver.copy_out(address + offset, nbytes) if nbytes else b""

    def lend(
        self, index: int, offset: int, nbytes: int, use: Callable[[memoryview], object]
    ) -> None:
        """Show a copy in a pinned buffer, of which there are as many as threads that ask at once.

        See `memory.api.Mapping`. DeviceFailed, OutOfRoom.
        """
        address, size = self._arena.spans[index]
        if offset < 0 or not 0 <= nbytes <= PIECE or offset + nbytes > size:
            raise ValueError(f"no {nbytes} bytes at {offset} in a chunk of {size}")
        driver = self._arena.driver
        with driver.current():
            pinned = self._free_buffer()
            try:
                if nbytes:
                    driver.copy_out_to(pinned.address, address + offset, nbytes)
                with pinned.view[:nbytes].toreadonly() as window:
                    use(window)
            finally:
                self._lent.put(pinned)

    def _free_buffer(self) -> Pinned:
        try:
            return self._lent.get_nowait()
        except Empty:
            return self._arena.driver.pin(PIECE)

    def _give_buffers_back(self) -> None:
        driver = self._arena.driver
        while not self._lent.empty():
            with driver.current():
                driver.unpin(self._lent.get_nowait())

    def close(self) -> None:
        """Unmap once the device is done; BufferError, and nothing done, while a buffer lives.

        DeviceFailed tells of the first failure, once. If that was to wait for the device, nothing
        is done, and it may be tried again.
        """
        if used := len(self._buffers):
            raise BufferError(f"{used} buffers over the weights are still alive")
        self._give_buffers_back()
        self._arena.unmap()
        _sweep()


class VmmBuffer:
    """The bytes of one chunk, for frameworks. Implements `memory.api.DeviceBuffer`."""

    __slots__ = ("__weakref__", "_address", "_arena", "_nbytes")

    def __init__(self, arena: _Arena, address: int, nbytes: int) -> None:
        self._arena, self._address, self._nbytes = arena, address, nbytes

    @property
    def address(self) -> int:
        """Where it starts in the device's address space."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Bytes of shape (nbytes,). Not told as read-only, though they are: torch refuses that."""
        return _array(self._address, self._nbytes)


def _undone(undo: Callable[..., None], *arguments: int) -> None:
    """Undo one step after another failed. If this fails as well, the other is what to tell."""
    with suppress(DeviceFailed):
        undo(*arguments)


def _array(address: int, nbytes: int) -> dict[str, Any]:
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Arena:
    """Mapped addresses, as long as a mapping or a buffer refers to this. `spans`: of each chunk."""

    def __init__(self, driver: Driver, address: int, sizes: tuple[int, ...]) -> None:
        self.driver = driver
        starts = accumulate(sizes[:-1], initial=address)
        self.spans = tuple(zip(starts, sizes, strict=True)) if sizes else ()
        self._finalizer = weakref.finalize(self, _DROPPED.append, (driver, self.spans))
        self._finalizer.atexit = False
        if not sizes:
            self._finalizer.detach()

    def unmap(self) -> None:
        """Unmap now, once the device is done with it; again, nothing."""
        if not self.spans:
            return
        with self.driver.current():
            self.driver.synchronize()
            spans, self.spans = self.spans, ()
            self._finalizer.detach()
            _unmap(self.driver, spans)


def _unmap(driver: Driver, spans: tuple[tuple[int, int], ...]) -> None:
    """Give up what the device is done with, in its context; if a step fails, all else all the same.

    Raises the first failure. No step is to be tried again: others may be at these addresses by
    then. What is left the driver gives up when this process ends.
    """
    steps = [partial(driver.unmap, *span) for span in spans]
    steps.append(partial(driver.free, spans[0][0], sum(nbytes for _, nbytes in spans)))
    failed: DeviceFailed | None = None
    for step in steps:
        try:
            step()
        except DeviceFailed as error:
            failed = failed or error
    if failed:
        raise failed


_DROPPED: deque[tuple[Driver, tuple[tuple[int, int], ...]]] = deque()
"""Spans of arenas that nobody refers to any more, still mapped."""


def _sweep() -> None:
    """Unmap what was dropped; nobody is there any more to be told of an error.

    Not done by the finalizers: a garbage collection may come at any time and in any thread, and to
    wait for the device while another thread captures a graph breaks the capture.
    """
    with suppress(IndexError):  # another thread may sweep as well
        while _DROPPED:
            driver, spans = _DROPPED.popleft()
            try:
                with driver.current():
                    driver.synchronize()
                    _unmap(driver, spans)
            except DeviceFailed as error:
                log.warning("%s", error)
