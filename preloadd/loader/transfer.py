"""How one piece gets from its file into the buffer it is given, either way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from preloadd.loader.pieces import Part, Piece
from preloadd.loader.route import Way
from preloadd.loader.source import OpenFile
from preloadd.memory.api import ALIGNED, Rows


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a chunk's `write` is given: `fill` fills a buffer of `span` bytes, in which `rows` are
    what is wanted, and says which way they came in the end."""

    span: int
    rows: Rows
    fill: Callable[[memoryview], Way]


def through_cache(file: OpenFile, piece: Piece) -> Transfer:
    """Read exactly what the piece is made of."""
    if not piece.parts:
        return Transfer(piece.span, piece.rows, lambda buffer: _read(file, piece, buffer))
    return Transfer(piece.rows.total, piece.rows, lambda buffer: _scatter(file, piece, buffer))


def past_cache(file: OpenFile, piece: Piece) -> Transfer:
    """Read whole blocks, of which those at both ends may belong to the neighbours as well.

    For pieces that are `whole`, and buffers that start at a multiple of ALIGNED.
    """
    skip = piece.offset % ALIGNED
    blocks = -(-(skip + piece.span) // ALIGNED) * ALIGNED
    rows = Rows(skip, piece.rows.total)

    def fill(buffer: memoryview) -> Way:
        with buffer[:blocks] as target:
            direct = file.read_direct(target, piece.offset - skip, skip + piece.span)
        _spread(buffer, piece.parts, skip)
        return Way.DIRECT if direct else Way.CACHE

    return Transfer(max(blocks, rows.end), rows, fill)


def _read(file: OpenFile, piece: Piece, buffer: memoryview) -> Way:
    file.read(buffer, piece.offset)
    return Way.CACHE


def _scatter(file: OpenFile, piece: Piece, buffer: memoryview) -> Way:
    """One call of the system for all parts."""
    targets = [buffer[part.place : part.place + part.nbytes] for part in piece.parts]
    try:
        file.scatter(targets, piece.offset)
    finally:
        # The frames of an error keep them, and they would keep the buffer.
        for target in targets:
            target.release()
    _clear_padding(buffer, piece.parts, 0)
    return Way.CACHE


def _spread(buffer: memoryview, parts: tuple[Part, ...], skip: int) -> None:
    """Move parts, which lie `skip` bytes into the buffer as in the file, to their places there.

    From the last one on, since each place is behind where the part was.
    """
    for part in reversed(parts):
        source, place = skip + part.start, skip + part.place
        buffer[place : place + part.nbytes] = buffer[source : source + part.nbytes]
    _clear_padding(buffer, parts, skip)


def _clear_padding(buffer: memoryview, parts: tuple[Part, ...], skip: int) -> None:
    """Leave nothing between the parts of what the buffer held before."""
    for part, after in pairwise(parts):
        start, end = skip + part.place + part.nbytes, skip + after.place
        buffer[start:end] = bytes(end - start)
