"""Reading files and nothing else: what page cache and disk give parallel readers at best."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from bench.gpu.meter import MIB


def read_rate(paths: Sequence[Path], *, threads: int, mib: int = 16, direct: bool = False) -> float:
    """GB/s of `threads` that read whole files in pieces of `mib` MiB into buffers of their own.

    `direct`: past the page cache, as `fio --direct=1` reads.
    """
    room = threading.local()
    piece = mib * MIB

    def prepare() -> None:
        room.buffer = mmap.mmap(-1, piece)
        room.buffer.madvise(mmap.MADV_HUGEPAGE)
        room.buffer.write(b"\1" * piece)

    def read(wanted: tuple[int, int]) -> int:
        return os.preadv(wanted[0], [room.buffer], wanted[1])

    with ExitStack() as undo:
        pieces = []
        for path in paths:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            undo.callback(os.close, fd)
            pieces += [(fd, offset) for offset in range(0, path.stat().st_size, piece)]
        pool = undo.enter_context(ThreadPoolExecutor(threads, initializer=prepare))
        list(pool.map(lambda _: time.sleep(0.05), range(threads)))  # so that all have their buffer
        started = time.perf_counter()
        nbytes = sum(pool.map(read, pieces))
        seconds = time.perf_counter() - started
    wanted = sum(path.stat().st_size for path in paths)
    if nbytes != wanted:
        raise ValueError(f"{nbytes:,} bytes came of {wanted:,}: reads were cut short")
    return nbytes / seconds / 1e9
