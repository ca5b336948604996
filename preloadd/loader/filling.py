"""Filling the chunks of an arena with our own reader, each handed over as soon as it is full."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

from preloadd.loader.native import Native
from preloadd.loader.reader import Batch, Readers
from preloadd.loader.report import Reporter, Tally
from preloadd.loader.route import Route
from preloadd.memory.api import Filler

LOADING = "loading"
"""The phase in which weights are read."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What filling cost: bytes read of the files, those of them past the page cache, and time; and
    bytes that a peer sent."""

    bytes_read: int
    bytes_direct: int
    seconds: float
    bytes_peer: int = 0


def fill(native: Native, filler: Filler, reporter: Reporter) -> Filled:
    """Make all chunks, fill them and hand them over; whatever comes, nothing stays open.

    The next chunk is made and begun before one is waited for, so that readers never run dry.
    """
    # Beforehand, for from then on the readers need the interpreter: to cut meanwhile cost a
    # fourteenth of the rate on an H200. Buffers are still being pinned, which needs none.
    wanted = [list(native.pieces_of(index)) for index in range(len(native.plan.chunks))]
    started = time.monotonic()
    told = Tally(reporter, LOADING, native.plan.tensor_nbytes)
    threads, staged = filler.threads, filler.staged
    with native.opened(direct=staged) as files, ExitStack() as undo:
        route = Route(threads) if staged else None
        # Chunks are closed after the readers, and all at the end: to unmap memory of a device keeps
        # other threads from using it.
        chunks = undo.enter_context(ExitStack())
        readers = undo.enter_context(
            Readers(files, threads=threads, route=route, writing=filler.writing)
        )
        begun: list[Batch] = []

        def hand_over(index: int) -> None:
            readers.wait(begun[index], told)
            reporter.chunk(index, begun[index].chunk)

        for index, nbytes in enumerate(native.plan.chunks):
            chunk = chunks.enter_context(filler.create(nbytes))
            begun.append(readers.start(chunk, wanted[index]))
            if index:
                hand_over(index - 1)
        hand_over(len(begun) - 1)
        return Filled(readers.bytes_read, readers.bytes_direct, time.monotonic() - started)
