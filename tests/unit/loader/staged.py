"""Memory that is written through a buffer, as a GPU's is: a real filler over memfds, for tests."""

import mmap
import os
import threading
from contextlib import contextmanager, nullcontext

from preloadd.memory.api import ALIGNED, MAX_SPAN
from preloadd.memory.host import HostFiller

DIRT = b"\xee"
"""What buffers hold before they are filled, so that what was not filled is seen."""


class StagedFiller:
    """Chunks of the host, written through page-aligned buffers that are never clean."""

    staged = True

    def __init__(self, threads=4, granularity=mmap.PAGESIZE):
        self.threads = threads
        self.granularity = granularity
        self.free = 1 << 40
        self.fails = None
        self.events = []
        self.spans = []

    def room(self):
        return self.free, "GPU-0 (a stand-in), where pid 7 (python) holds 1.0 GiB,"

    def available(self):
        return self.free

    def writing(self):
        return nullcontext()

    @contextmanager
    def create(self, nbytes):
        self.events.append(("create", nbytes))
        with HostFiller().create(nbytes) as chunk:
            yield StagedChunk(self, chunk)
        self.events.append(("close", nbytes))

    def close(self):
        self.events.append(("close filler",))


class StagedChunk:
    """Writes rows out of a buffer of its own for each write; `finish` must come after the last."""

    def __init__(self, filler, chunk):
        self.filler, self.chunk = filler, chunk
        self.writing = 0
        self.lock = threading.Lock()

    @property
    def nbytes(self):
        return self.chunk.nbytes

    @property
    def fd(self):
        return self.chunk.fd

    def write(self, target, span, rows, read):
        rows.check(span)
        assert span <= MAX_SPAN
        with self.lock:
            self.writing += 1
            self.filler.spans.append((span, rows))
        buffer = mmap.mmap(-1, -(-span // ALIGNED) * ALIGNED)
        buffer.write(DIRT * len(buffer))
        with memoryview(buffer) as view, view[:span] as window:
            read(window)
        for row in range(rows.count):
            start = rows.skip + row * rows.stride
            os.pwrite(
                self.fd.fileno(), buffer[start : start + rows.nbytes], target + row * rows.nbytes
            )
        buffer.close()
        with self.lock:
            self.writing -= 1

    def finish(self):
        assert not self.writing
        self.filler.events.append(("finish", self.nbytes))
        if self.filler.fails is not None:
            raise self.filler.fails
