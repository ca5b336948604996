"""Where bytes live, seen from the three processes that touch them.

A *filler* (loader) makes chunks and writes them, a *keeper* (rank) proves and seals descriptors
without mapping them, a *mapper* (engine) maps them, unable to change them. One backend provides
the three; composition roots choose it, nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from preloadd.linux.fds import OwnedFd

ALIGNED = 4096
"""Staged writes read into buffers that start at multiples of this, as O_DIRECT wants them."""

PIECE = 8 << 20
"""Bytes of one read and one write. Measured on an H200: with half as many, calls are what it takes;
with twice as many, pinning the buffers."""

MAX_SPAN = PIECE + 2 * ALIGNED
"""The longest span of one `write`: a piece with both its ends moved to ALIGNED."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which bytes of a span are wanted: `count` rows of `nbytes`, the first `skip` bytes into it,
    each `stride` after the one before."""

    skip: int
    nbytes: int
    count: int = 1
    stride: int = 0

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return self.nbytes * self.count

    @property
    def contiguous(self) -> bool:
        """Whether the rows follow each other without gaps, so that they are as good as one."""
        return self.count == 1 or self.stride == self.nbytes

    @property
    def end(self) -> int:
        """Where the last row ends in the span."""
        return self.skip + (self.count - 1) * self.stride + self.nbytes

    def check(self, span: int) -> None:
        """ValueError unless the rows lie one after the other inside a span of so many bytes."""
        apart = self.count == 1 or self.stride >= self.nbytes
        if self.skip < 0 or self.nbytes < 0 or self.count < 1 or not apart or self.end > span:
            raise ValueError(f"no {self} in a span of {span} bytes")


class WritableChunk(Protocol):
    """One allocation under construction. The filler that made it unmaps it on `close`."""

    @property
    def nbytes(self) -> int:
        """Size of the chunk in bytes."""

    @property
    def fd(self) -> OwnedFd:
        """The descriptor; the chunk owns it until `close`."""

    def write(
        self, target: int, span: int, rows: Rows, read: Callable[[memoryview], object]
    ) -> None:
        """Put `rows` of a span at byte `target`, packed. Several threads may do so at once.

        `read` fills the buffer of exactly `span` bytes that it is given, and keeps nothing of it;
        what it raises passes through. Blocks while no buffer is free. ValueError if it does not
        fit the chunk, or a staged span exceeds MAX_SPAN.
        """

    def finish(self) -> None:
        """Wait until every write has arrived; DeviceFailed if one could not. Threads must be done.

        Before it, what the chunk holds is undefined.
        """

    def close(self) -> None:
        """Unmap and close the descriptor. Copies of the descriptor elsewhere keep the memory."""


class Filler(Protocol):
    """Makes the chunks of a new generation. Owns its buffers and its context until `close`."""

    @property
    def granularity(self) -> int:
        """Chunk sizes are multiples of this many bytes."""

    @property
    def staged(self) -> bool:
        """Whether `write` goes through a buffer anyway, one that starts at a multiple of ALIGNED.

        Reading past the page cache and reading more than is wanted cost nothing extra then.
        """

    @property
    def threads(self) -> int:
        """How many threads write at once with profit."""

    def room(self) -> tuple[int, str]:
        """Bytes that can still be allocated, and what bounds them (for the error text)."""

    def available(self) -> int:
        """Those bytes alone, which takes less time."""

    def writing(self) -> AbstractContextManager[object]:
        """A block for a thread that writes many times: what each write would prepare is done once.

        DeviceFailed where that fails.
        """

    def create(self, nbytes: int) -> AbstractContextManager[WritableChunk]:
        """A zero-filled chunk; `OutOfRoom` or `OutOfDescriptors` when the system refuses."""

    def close(self) -> None:
        """Give up buffers and context. Chunks are closed before."""


class Keeper(Protocol):
    """Proves descriptors without touching the bytes behind them."""

    def seal(self, fd: int, nbytes: int) -> None:
        """Make the chunk unwritable from now on, where the memory has that; DamagedManifest if it
        is none of ours."""

    def verify(self, fd: int, nbytes: int) -> None:
        """DamagedManifest unless `fd` is a chunk; as far as it can be told, of `nbytes`, sealed."""


class DeviceBuffer(Protocol):
    """The bytes of one chunk on a device, for frameworks. The mapping lasts while it lives."""

    @property
    def address(self) -> int:
        """Where it starts in the device's address space."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface, as unsigned bytes of shape (nbytes,)."""


class Mapping(Protocol):
    """A mapped arena: the chunks of one generation in one process."""

    @property
    def writable(self) -> bool:
        """Whether the memory itself, which others map too, can be changed through this mapping.

        Always False for engines; here so that the contract can be tested.
        """

    @property
    def private_nbytes(self) -> int:
        """Bytes that are this process's own by now, since it wrote there; 0 unless mapped private.

        Whole pages count. All private mappings of these chunks in this process count together.
        """

    def room(self) -> tuple[int, str]:
        """Bytes free in the memory that this is mapped in, and what bounds them (for the error
        text)."""

    def chunk(self, index: int) -> memoryview | DeviceBuffer:
        """The bytes of one chunk: a view of host memory, or a buffer on the device.

        Read-only, unless it was mapped private: then who writes gets pages of its own.
        """

    def read(self, index: int, offset: int, nbytes: int) -> bytes:
        """A copy of some bytes of a chunk in host memory; ValueError outside of it."""

    def lend(
        self, index: int, offset: int, nbytes: int, use: Callable[[memoryview], object]
    ) -> None:
        """Have `use` look at up to PIECE bytes of a chunk, where they lie or in a pinned buffer.

        It keeps nothing of them; what it raises passes through. ValueError outside of the chunk,
        or for more bytes. Several threads may do so at once.
        """

    def close(self) -> None:
        """Unmap, once the device is done with it. BufferError, and nothing unmapped, while views
        or buffers of it live."""


class Mapper(Protocol):
    """Maps what a daemon granted."""

    @property
    def private(self) -> bool:
        """Whether what is mapped may be written to, each page becoming this process's own first."""

    def map(self, chunks: Sequence[tuple[OwnedFd, int]]) -> Mapping:
        """Map every (descriptor, size); takes and closes the descriptors, also on errors.

        DamagedManifest if one is unsealed, of another size, or nothing that can be mapped.
        """
