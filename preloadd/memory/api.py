"""Where bytes live, seen from the three processes that touch them.

A *filler* (loader) makes chunks and writes them, a *keeper* (rank) proves and seals descriptors
without mapping them, a *mapper* (engine) maps them read-only. One backend provides the three;
composition roots choose it, nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from preloadd.linux.fds import OwnedFd


class WritableChunk(Protocol):
    """One allocation under construction. The filler that made it unmaps it on `close`."""

    @property
    def nbytes(self) -> int:
        """Size of the chunk in bytes."""

    @property
    def fd(self) -> OwnedFd:
        """The descriptor; the chunk owns it until `close`."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A writable window of bytes; the caller releases it before `close`."""

    def close(self) -> None:
        """Unmap and close the descriptor. Copies of the descriptor elsewhere keep the memory."""


class Filler(Protocol):
    """Makes the chunks of a new generation."""

    @property
    def granularity(self) -> int:
        """Chunk sizes are multiples of this many bytes."""

    def room(self) -> tuple[int, str]:
        """Bytes that can still be allocated, and what bounds them (for the error text)."""

    def create(self, nbytes: int) -> AbstractContextManager[WritableChunk]:
        """A zero-filled chunk; `OutOfRoom` or `OutOfDescriptors` when the system refuses."""


class Keeper(Protocol):
    """Proves descriptors without touching the bytes behind them."""

    def seal(self, fd: int, nbytes: int) -> None:
        """Make the chunk unwritable from now on; DamagedManifest if it is none of ours."""

    def verify(self, fd: int, nbytes: int) -> None:
        """DamagedManifest unless `fd` is a sealed chunk of exactly `nbytes`."""


class Mapping(Protocol):
    """A mapped arena: the chunks of one generation in one process."""

    @property
    def writable(self) -> bool:
        """Always False for engines; here so that the contract can be tested."""

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk, read-only (host memory only)."""

    def close(self) -> None:
        """Unmap. BufferError while views of it live, on host memory."""


class Mapper(Protocol):
    """Maps what a daemon granted."""

    def map(self, chunks: Sequence[tuple[OwnedFd, int]]) -> Mapping:
        """Map every (descriptor, size) read-only; takes and closes the descriptors, also on errors.

        DamagedManifest if one is unsealed or of another size.
        """
