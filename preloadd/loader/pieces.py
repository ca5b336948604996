"""From runs of bytes to what one `write` brings: bounded, in the order of the files. Pure.

Runs that follow each other in a file and in the arena are read as one, however small they are: a
model may have 100,000 scales of four bytes, and each call of a write costs as much as 2 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby

from preloadd.domain.manifest import ALIGNMENT
from preloadd.memory.api import PIECE, Rows
from preloadd.weights.plan import Run

APART = 128 << 10
"""From this gap on, rows are read one by one: to read it as well would take longer than a call."""

MAX_PARTS = 256
"""Parts of one piece: each is a buffer of one system call, which takes 1,024."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a piece: where in its span of the file, how many, and where in its place."""

    start: int
    nbytes: int
    place: int


@dataclass(frozen=True, slots=True)
class Piece:
    """`span` bytes of a file from `offset` on, of which `rows` go to byte `target` of a chunk.

    Where `parts` are given, the single row is made of them and of the padding between them, which
    the file does not have; else the rows are bytes of the span as they are.
    """

    file: int
    offset: int
    span: int
    target: int
    rows: Rows
    parts: tuple[Part, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether every byte of the span is wanted."""
        return self.rows.count == 1


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes that are contiguous in a file and in a chunk."""

    file: int
    offset: int
    nbytes: int
    target: int

    @property
    def end(self) -> int:
        """Where it ends in the chunk."""
        return self.target + self.nbytes

    def split(self, nbytes: int) -> tuple[_Stretch, _Stretch]:
        """The first `nbytes`, or as many as there are, and the rest."""
        nbytes = min(nbytes, self.nbytes)
        rest = self.nbytes - nbytes
        return (
            _Stretch(self.file, self.offset, nbytes, self.target),
            _Stretch(self.file, self.offset + nbytes, rest, self.target + nbytes),
        )


def pieces(placed: Iterable[tuple[Run, int]], piece: int = PIECE) -> Iterator[Piece]:
    """Cut runs, each given with its place in the chunk, into pieces of at most `piece` bytes.

    Neither what a piece takes of the file nor its place in the chunk is longer.
    """
    for strided, group in groupby(placed, lambda each: _strided(each[0], piece)):
        if strided:
            for run, target in group:
                yield from _rows(run, target, piece)
        else:
            yield from _packed(chain.from_iterable(_stretches(*each) for each in group), piece)


def _strided(run: Run, piece: int) -> bool:
    """Whether rows are best read together with what lies between them."""
    gap = run.stride - run.row_nbytes
    return run.rows > 1 and 0 < gap < APART and run.stride + run.row_nbytes <= piece


def _rows(run: Run, target: int, piece: int) -> Iterator[Piece]:
    step = 1 + (piece - run.row_nbytes) // run.stride
    for row in range(0, run.rows, step):
        rows = Rows(0, run.row_nbytes, min(step, run.rows - row), run.stride)
        offset = run.offset + row * run.stride
        yield Piece(run.file, offset, rows.end, target + row * run.row_nbytes, rows)


def _stretches(run: Run, target: int) -> Iterator[_Stretch]:
    if run.rows == 1 or run.stride == run.row_nbytes:
        yield _Stretch(run.file, run.offset, run.nbytes, target)
        return
    for row in range(run.rows):
        offset, place = run.offset + row * run.stride, target + row * run.row_nbytes
        yield _Stretch(run.file, offset, run.row_nbytes, place)


def _packed(stretches: Iterable[_Stretch], piece: int) -> Iterator[Piece]:
    """Pieces as full as can be."""
    taken: list[_Stretch] = []
    for stretch in stretches:
        rest = stretch
        while rest.nbytes:
            room = piece - (rest.target - taken[0].target) if taken else piece
            if taken and (room <= 0 or not _follows(rest, taken[-1]) or len(taken) == MAX_PARTS):
                yield _piece(taken)
                taken = []
                room = piece
            first, rest = rest.split(room)
            _add(taken, first)
    if taken:
        yield _piece(taken)


def _follows(stretch: _Stretch, last: _Stretch) -> bool:
    """Whether nothing but padding is between the two, and that only in the chunk."""
    return (
        stretch.file == last.file
        and stretch.offset == last.offset + last.nbytes
        and 0 <= stretch.target - last.end < ALIGNMENT
    )


def _add(taken: list[_Stretch], more: _Stretch) -> None:
    """Add what follows, as one with the last where no padding is between them."""
    if taken and more.target == taken[-1].end:
        last = taken.pop()
        more = _Stretch(last.file, last.offset, last.nbytes + more.nbytes, last.target)
    taken.append(more)


def _piece(taken: list[_Stretch]) -> Piece:
    first, last = taken[0], taken[-1]
    span = last.offset + last.nbytes - first.offset
    rows = Rows(0, last.end - first.target)
    if len(taken) == 1:
        return Piece(first.file, first.offset, span, first.target, rows)
    parts = tuple(
        Part(each.offset - first.offset, each.nbytes, each.target - first.target) for each in taken
    )
    return Piece(first.file, first.offset, span, first.target, rows, parts)
