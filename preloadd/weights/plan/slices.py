"""The geometry of a cut: from spans along one axis of a stored tensor to runs of bytes in its file.

Tensors lie in files row-major and packed. A cut keeps the order of what it takes, so a slice is
the taken spans one after the other, contiguous in the arena.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from preloadd.domain import dtypes
from preloadd.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor as a checkpoint stores it, already proved by whoever read the header.

    `file` is an index the caller knows, `dtype` a name of `domain.dtypes`, `start` the offset from
    the beginning of the file, `nbytes` what `shape` and `dtype` make.
    """

    file: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """`rows` pieces of `row_nbytes` each, `stride` bytes apart in the file, adjacent in the arena.

    One row has its own length as stride, so `stride == row_nbytes` means contiguous.
    """

    file: int
    offset: int
    row_nbytes: int
    rows: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Bytes the run brings into the arena."""
        return self.rows * self.row_nbytes


@dataclass(frozen=True, slots=True)
class Slice:
    """What a rank holds of one tensor; `runs` in arena order, none where there are no bytes.

    The rank's tensor is the concatenation, along `axis`, of the `spans` of the whole tensor: that
    suffices to put shards together again. `axis` is None where the rank holds the whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    axis: int | None
    spans: tuple[range, ...]
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the slice, in the file as in the arena."""
        return sum(run.nbytes for run in self.runs)


def whole(name: str, source: Source) -> Slice:
    """All of the tensor."""
    run = Run(source.file, source.start, source.nbytes, rows=1, stride=source.nbytes)
    return Slice(
        name=name,
        dtype=source.dtype,
        shape=source.shape,
        whole_shape=source.shape,
        axis=None,
        spans=(),
        runs=(run,) if source.nbytes else (),
    )


def cut(name: str, source: Source, axis: int, spans: Iterable[range]) -> Slice:
    """The `spans` (ascending, disjoint, step 1) along `axis`, and not a byte more.

    UnsupportedModel when a packed dtype would have to be cut inside a byte.
    """
    taken = _joined(spans)
    length = sum(map(len, taken))
    if length == source.shape[axis]:
        return whole(name, source)
    shape = (*source.shape[:axis], length, *source.shape[axis + 1 :])
    return Slice(
        name=name,
        dtype=source.dtype,
        shape=shape,
        whole_shape=source.shape,
        axis=axis,
        spans=taken,
        runs=_runs(name, source, axis, taken) if math.prod(shape) else (),
    )


def _joined(spans: Iterable[range]) -> tuple[range, ...]:
    joined: list[range] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = range(joined[-1].start, span.stop)
        elif span:
            joined.append(span)
    return tuple(joined)


def _runs(name: str, source: Source, axis: int, spans: tuple[range, ...]) -> tuple[Run, ...]:
    outer = math.prod(source.shape[:axis])
    inner = math.prod(source.shape[axis + 1 :])
    length = source.shape[axis]

    def nbytes(steps: int) -> int:
        return _whole_bytes(name, source.dtype, steps * inner)

    def run(first: int, span: range, rows: int, pitch: int) -> Run:
        row = nbytes(len(span))
        stride = nbytes(pitch) if rows > 1 else row
        return Run(source.file, source.start + nbytes(first), row, rows, stride)

    pitch = _pitch(spans, length, outer)
    if pitch:
        return (run(spans[0].start, spans[0], outer * len(spans), pitch),)
    return tuple(
        run(index * length + span.start, span, 1, 0) for index in range(outer) for span in spans
    )


def _pitch(spans: tuple[range, ...], length: int, outer: int) -> int | None:
    """Steps from one row to the next where all rows of all spans are equally long and apart."""
    if len(spans) == 1:
        return length
    lengths = {len(span) for span in spans}
    pitches = {after.start - before.start for before, after in pairwise(spans)}
    if len(lengths) > 1 or len(pitches) > 1:
        return None
    pitch = pitches.pop()
    return pitch if outer == 1 or pitch * len(spans) == length else None


def _whole_bytes(name: str, dtype: str, elements: int) -> int:
    nbytes, rest = divmod(elements * dtypes.BITS[dtype], 8)
    if rest:
        raise UnsupportedModel(
            f"{name}: a cut after {elements} elements of {dtype} falls inside a byte: "
            "use a smaller tensor parallel size, or 1"
        )
    return nbytes
