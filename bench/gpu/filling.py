"""Our own reader and ring with other numbers of threads and other sizes of pieces than it has."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

from preloadd.domain.settings import CHUNK_BYTES, Memory, ModelSettings, RankSettings
from preloadd.loader.native import Native
from preloadd.loader.reader import Readers
from preloadd.loader.route import Route
from preloadd.memory.api import ALIGNED
from preloadd.memory.cuda.driver import open_ordinal
from preloadd.memory.vmm import VmmFiller


class Filling:
    """Fills arenas with one checkpoint, on the first GPU, and gives them up at once."""

    def __init__(self, model: str) -> None:
        self._model = ModelSettings(
            model, model, memory=Memory.CUDA, chunk_bytes=CHUNK_BYTES[Memory.CUDA]
        )

    def fill(self, threads: int, piece: int, buffers: int) -> float:
        """GB/s of one load, from the first chunk to the last byte, buffers of `piece` bytes being
        pinned meanwhile, as in a real load."""
        driver = open_ordinal(0)
        filler = VmmFiller(
            driver, threads=threads, buffers=buffers or None, longest=piece + 2 * ALIGNED
        )
        with closing(filler):
            settings = RankSettings(
                "bench", str(driver.device), "", derived=False, model=self._model
            )
            native = Native(settings, filler.granularity)
            count = len(native.plan.chunks)
            wanted = [list(native.pieces_of(index, piece)) for index in range(count)]
            started = time.perf_counter()
            with native.opened(direct=True) as files, ExitStack() as undo:
                chunks = undo.enter_context(ExitStack())
                readers = undo.enter_context(
                    Readers(files, threads=threads, route=Route(threads), writing=filler.writing)
                )
                batches = [
                    readers.start(chunks.enter_context(filler.create(nbytes)), pieces)
                    for nbytes, pieces in zip(native.plan.chunks, wanted, strict=True)
                ]
                for batch in batches:
                    readers.wait(batch, lambda _: None)
                seconds = time.perf_counter() - started
            return native.plan.tensor_nbytes / seconds / 1e9
