"""Reading byte runs of a checkpoint straight into their place, with a few threads.

`preadv` and not a mapping: a disk error is an exception that names the file, not a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from preloadd.weights.checkpoint.reading import read_into

PIECE = 16 << 20
"""Bytes of one read: long enough for any disk, short enough to spread a tensor over threads."""

SCRATCH = 8 << 20
"""Bytes a strided read may take at once besides its destination."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A shard being read. The descriptor is borrowed."""

    path: Path
    fd: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of `row_nbytes`, `stride` apart in the file from `offset` on; packed at `target`."""

    file: int
    offset: int
    row_nbytes: int
    rows: int
    stride: int
    target: int


def pieces(
    file: int, offset: int, row_nbytes: int, rows: int, stride: int, target: int
) -> Iterator[Piece]:
    """Cut one run into reads of bounded size. Pure."""
    if rows > 1 and stride == row_nbytes:
        row_nbytes, rows, stride = row_nbytes * rows, 1, row_nbytes * rows
    if rows == 1:
        for start in range(0, row_nbytes, PIECE):
            nbytes = min(PIECE, row_nbytes - start)
            yield Piece(file, offset + start, nbytes, 1, nbytes, target + start)
        return
    step = SCRATCH // stride
    if not step:
        for row in range(rows):
            start, place = offset + row * stride, target + row * row_nbytes
            yield from pieces(file, start, row_nbytes, 1, row_nbytes, place)
        return
    for row in range(0, rows, step):
        yield Piece(
            file,
            offset + row * stride,
            row_nbytes,
            min(step, rows - row),
            stride,
            target + row * row_nbytes,
        )


def read(
    files: Sequence[OpenFile],
    wanted: Sequence[Piece],
    window: memoryview,
    *,
    threads: int,
    done: Callable[[int], None],
) -> None:
    """Fill `window` with every piece; `done` is called in this thread with bytes as they arrive.

    ReadFailed names the file and the offset at the first error; no thread touches `window` after.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="reader") as pool:
        pending: set[Future[int]] = set()
        try:
            for piece in wanted:
                if len(pending) >= 4 * threads:
                    pending = _settle(pending, done)
                pending.add(pool.submit(_read_piece, files[piece.file], piece, window))
            while pending:
                pending = _settle(pending, done)
        finally:
            for future in pending:
                future.cancel()


def _settle(pending: set[Future[int]], done: Callable[[int], None]) -> set[Future[int]]:
    finished, rest = wait(pending, timeout=0.25, return_when=FIRST_COMPLETED)
    for future in finished:
        done(future.result())
    if not finished:
        done(0)
    return rest


def _read_piece(file: OpenFile, piece: Piece, window: memoryview) -> int:
    nbytes = piece.row_nbytes * piece.rows
    with window[piece.target : piece.target + nbytes] as target:
        if piece.rows == 1:
            read_into(file.fd, target, piece.offset, file.path)
            return nbytes
        span = (piece.rows - 1) * piece.stride + piece.row_nbytes
        scratch = memoryview(bytearray(span))
        read_into(file.fd, scratch, piece.offset, file.path)
        for row in range(piece.rows):
            source = row * piece.stride
            place = row * piece.row_nbytes
            target[place : place + piece.row_nbytes] = scratch[source : source + piece.row_nbytes]
    return span
