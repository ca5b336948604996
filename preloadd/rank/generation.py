"""A generation in this process: descriptors of an arena and its manifest, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from preloadd.domain.ids import GenerationId
from preloadd.domain.manifest import Manifest
from preloadd.linux.fds import OwnedFd


class Generation:
    """Owns one descriptor a chunk and the sealed manifest's. Nothing here maps a byte of them."""

    def __init__(self, manifest: Manifest, sealed: OwnedFd, chunks: Sequence[OwnedFd]) -> None:
        self.manifest = manifest
        self.sealed = sealed
        self.chunks = tuple(chunks)

    @property
    def id(self) -> GenerationId:
        """The id drawn when the arena was filled."""
        return GenerationId(self.manifest.generation)

    @property
    def arena_nbytes(self) -> int:
        """Bytes of all chunks, padding included."""
        return sum(self.manifest.chunks)

    def descriptors(self) -> list[OwnedFd]:
        """Fresh duplicates to hand over: the manifest's, then every chunk's in order. OSError."""
        copies = []
        with ExitStack() as undo:
            for fd in (self.sealed, *self.chunks):
                copies.append(fd.duplicate())
                undo.callback(copies[-1].close)
            undo.pop_all()
        return copies

    def close(self) -> None:
        """Close every descriptor; engines that mapped the arena keep their mappings."""
        for fd in (self.sealed, *self.chunks):
            fd.close()


def manifest_name(generation: str) -> str:
    """Under which name the manifest of a generation is parked."""
    return f"manifest.{generation}"


def chunk_name(generation: str, index: int) -> str:
    """Under which name a chunk is parked."""
    return f"chunk.{generation}.{index}"
