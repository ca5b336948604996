"""Reading pieces of a checkpoint into chunks, with a few threads that last for a whole load.

`preadv` and not a mapping: a disk error is an exception that names the file, not a signal. What is
done for one piece is short, since all threads share one interpreter: at 40 GB/s there are 2,500
pieces a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from queue import SimpleQueue

from preloadd.linux.owner import Owner
from preloadd.linux.threads import starting
from preloadd.loader.pieces import Piece
from preloadd.loader.route import SMALL, Route, Way
from preloadd.loader.source import OpenFile
from preloadd.loader.transfer import Transfer, past_cache, through_cache
from preloadd.memory.api import WritableChunk

_TELL_S = 0.2
"""Seconds between two reports of how far a batch has come."""


class Batch:
    """The pieces of one chunk on their way: how many are left, and the bytes that are there."""

    def __init__(self, chunk: WritableChunk, count: int) -> None:
        self.chunk = chunk
        self.left = count
        self.arrived = 0


class Readers(Owner):
    """Threads that read from borrowed `files` what they are given, in that order.

    With a `route`, which is for chunks of a staged filler alone, files are also read past the page
    cache. `bytes_read` and `bytes_direct` count what was read of the files, all and so.
    Each thread is in a block of `writing`, the filler's. PreloadError if a thread cannot be
    started.
    """

    def __init__(
        self,
        files: Sequence[OpenFile],
        *,
        threads: int,
        route: Route | None = None,
        writing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.bytes_read = 0
        self.bytes_direct = 0
        self._files = files
        self._route = route
        self._writing = writing
        self._work: SimpleQueue[tuple[Batch, Piece] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._stopped = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        with ExitStack() as undo, starting("reading the checkpoint"):
            undo.callback(self.close)
            for number in range(threads):
                thread = threading.Thread(target=self._serve, name=f"reader-{number}")
                thread.start()
                self._threads.append(thread)
            undo.pop_all()

    def start(self, chunk: WritableChunk, wanted: Iterable[Piece]) -> Batch:
        """Have `wanted` read into `chunk`, which is borrowed until it is waited for, or `close`."""
        pieces = list(wanted)
        batch = Batch(chunk, len(pieces))
        for piece in pieces:
            self._work.put((batch, piece))
        return batch

    def wait(self, batch: Batch, done: Callable[[int], None]) -> None:
        """Until the chunk holds it all; `done` is called in this thread with bytes as they arrive.

        ReadFailed names file and offset of the first error, DeviceFailed and OutOfRoom are the
        chunk's. After an error nothing else is begun.
        """
        told = 0
        while True:
            with self._changed:
                ended = self._changed.wait_for(
                    lambda: self._error is not None or not batch.left, _TELL_S
                )
                error, arrived = self._error, batch.arrived
            if error is not None:
                raise error
            done(arrived - told)
            told = arrived
            if ended:
                batch.chunk.finish()
                return

    def close(self) -> None:
        """Begin nothing else, and wait for the threads; then no chunk is touched any more."""
        self._stopped = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        try:
            with self._writing():
                self._work_off()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._fail(error)

    def _work_off(self) -> None:
        while (given := self._work.get()) is not None:
            if self._stopped:
                continue
            batch, piece = given
            try:
                way = self._read(self._files[piece.file], piece, batch.chunk)
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                self._fail(error)
            else:
                self._settle(batch, piece, way)

    def _read(self, file: OpenFile, piece: Piece, chunk: WritableChunk) -> Way:
        route = self._route
        # Between the rows of a piece are those of other ranks: through the cache, the disk is asked
        # for them once.
        if route is None or not file.direct or not piece.whole or piece.span < SMALL:
            return _write(chunk, piece, through_cache(file, piece)).way
        cached = file.cached(piece.offset, piece.span)
        direct = route.choose(cached=cached) is Way.DIRECT
        transfer = past_cache(file, piece) if direct else through_cache(file, piece)
        took = _write(chunk, piece, transfer)
        if not cached:
            route.learn(took.way, piece.span, took.seconds)
        return took.way

    def _settle(self, batch: Batch, piece: Piece, way: Way) -> None:
        with self._changed:
            self.bytes_read += piece.span
            self.bytes_direct += piece.span if way is Way.DIRECT else 0
            batch.arrived += piece.rows.total
            batch.left -= 1
            if not batch.left:
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()


class _Timed:
    """A `fill` that remembers which way it went and how long that took, without any waiting for a
    buffer."""

    __slots__ = ("_fill", "seconds", "way")

    def __init__(self, fill: Callable[[memoryview], Way]) -> None:
        self._fill = fill
        self.way = Way.CACHE
        self.seconds = 0.0

    def __call__(self, buffer: memoryview) -> None:
        started = time.perf_counter()
        self.way = self._fill(buffer)
        self.seconds = time.perf_counter() - started


def _write(chunk: WritableChunk, piece: Piece, transfer: Transfer) -> _Timed:
    timed = _Timed(transfer.fill)
    chunk.write(piece.target, transfer.span, transfer.rows, timed)
    return timed
