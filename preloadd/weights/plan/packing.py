"""Where slices go: storages at aligned offsets in as few chunks as the chunk size allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from preloadd.domain import dtypes
from preloadd.domain.manifest import ALIGNMENT, MAX_CHUNKS, Kind, Storages, Tensors
from preloadd.errors import ConfigError
from preloadd.weights.plan.slices import Slice

_WASTE_MATTERS_FROM = 1 << 30
_WASTE_PARTS = 200
"""From this many bytes up, chunk ends may waste at most one part in so many of the arena.

With storages of 100 KiB on average, the padding between them stays below as much again.
"""


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """One rank's arena. Row n of `storages` and of `tensors` is where `slices[n]` goes.

    `chunks` are sizes in bytes, multiples of the granularity, never empty; each ends where its last
    storage ends. Files do not say what a tensor is in the model, so every kind is PARAMETER.
    """

    chunks: tuple[int, ...]
    slices: tuple[Slice, ...]
    storages: Storages
    tensors: Tensors

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(self.storages.nbytes)

    @property
    def arena_nbytes(self) -> int:
        """Bytes of all chunks: what has to be allocated."""
        return sum(self.chunks)


def pack(slices: Iterable[Slice], chunk_bytes: int, granularity: int) -> ArenaPlan:
    """Lay out `slices` in the order given, which `select` makes the order of the files.

    Chunks are those of `lay_out`; so are errors.
    """
    held = tuple(slices)
    chunks, storages = lay_out([each.nbytes for each in held], chunk_bytes, granularity)
    return ArenaPlan(chunks, held, storages, _tensors(held))


def lay_out(
    sizes: Sequence[int], chunk_bytes: int, granularity: int
) -> tuple[tuple[int, ...], Storages]:
    """Sizes of chunks, and where storages of `sizes` bytes go in them, in the order given.

    Chunks hold up to `chunk_bytes` (rounded up to `granularity`, a multiple of ALIGNMENT); a larger
    storage gets a chunk of its own. Where that would be more than MAX_CHUNKS, or waste too much of
    a large arena at chunk ends, chunks are larger. ConfigError unless both sizes make sense.
    """
    if chunk_bytes < 1:
        raise ConfigError(f"chunk size is {chunk_bytes} bytes: at least 1")
    if granularity < 1 or granularity % ALIGNMENT:
        raise ConfigError(f"granularity is {granularity} bytes: expected multiples of {ALIGNMENT}")
    limit = _rounded(chunk_bytes, granularity)
    layout = _lay(sizes, limit)
    while len(layout.ends) > 1 and not _frugal(layout, granularity, sum(sizes)):
        limit *= 2
        layout = _lay(sizes, limit)
    chunks = tuple(max(_rounded(end, granularity), granularity) for end in layout.ends)
    return chunks, Storages(chunk=layout.chunk, offset=layout.offset, nbytes=list(sizes))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Chunk and offset of each storage, and where the last storage of each chunk ends."""

    chunk: list[int]
    offset: list[int]
    ends: list[int]


def _lay(sizes: Sequence[int], limit: int) -> _Layout:
    """Fill chunk after chunk: in a fixed order nothing needs fewer chunks than this."""
    chunk, offset, ends = [], [], [0]
    for nbytes in sizes:
        start = _rounded(ends[-1], ALIGNMENT)
        if start and nbytes and start + nbytes > limit:
            ends.append(0)
            start = 0
        chunk.append(len(ends) - 1)
        offset.append(start)
        ends[-1] = start + nbytes
    return _Layout(chunk, offset, ends)


def _frugal(layout: _Layout, granularity: int, total: int) -> bool:
    if len(layout.ends) > MAX_CHUNKS:
        return False
    wasted = sum(_rounded(end, granularity) - end for end in layout.ends)
    return total < _WASTE_MATTERS_FROM or wasted * _WASTE_PARTS <= total


def _rounded(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def _tensors(slices: Sequence[Slice]) -> Tensors:
    return Tensors(
        name=[each.name for each in slices],
        kind=[int(Kind.PARAMETER)] * len(slices),
        dtype=[dtypes.CODES[each.dtype] for each in slices],
        shape=[each.shape for each in slices],
        strides=[None] * len(slices),
        storage=list(range(len(slices))),
        skip=[0] * len(slices),
    )
