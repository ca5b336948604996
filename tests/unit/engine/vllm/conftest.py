"""Attached weights as a builder might have left them, without a daemon behind their lease."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from preloadd.domain.ids import device_id
from preloadd.domain.leases import Mode
from preloadd.domain.manifest import Manifest
from preloadd.engine.arenas import Arenas, Identity
from preloadd.engine.client import Attachment
from preloadd.engine.torch import Weights
from preloadd.engine.watch import Line
from preloadd.linux import seqpacket
from preloadd.memory.api import Rows
from preloadd.memory.host import HostFiller, HostKeeper, HostMapper
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Client


@pytest.fixture
def weights_of() -> Iterator[Callable[..., Weights]]:
    """Makes weights of a manifest, in memory that holds some number at every multiple of four.

    It is mapped as engines of vLLM map it: a write that nobody stops stays in this process.
    """
    made: list[Weights] = []
    with ExitStack() as undo:

        def weights_of(described: Manifest, mode: Mode = Mode.ZERO_COPY) -> Weights:
            fds = [_filled(nbytes, undo) for nbytes in described.chunks]
            identity = Identity(
                "host", device_id("CPU-0"), described.generation, described.chunks, True
            )
            arena = Arenas().share(identity, fds, HostMapper(private=True))
            ours, theirs = seqpacket.pair()
            undo.callback(theirs.close)
            client = Client(ours, "no daemon")
            line = Line("CPU-0", lambda: client, 1.0)
            granted = m.Granted(described.generation, "0" * 16, "host", 1, described.chunks)
            made.append(Weights(Attachment(client, granted, described, arena, line, 1.0), mode))
            undo.callback(made[-1].abandon)  # where a test failed, its tensors are still in use
            return made[-1]

        yield weights_of
        for weights in made:
            try:
                weights.close()
            except BufferError:
                gc.collect()  # an error that was expected may hold tensors of the test
                weights.close()


def _filled(nbytes: int, undo: ExitStack):
    numbers = torch.arange(1, math.ceil(nbytes / 4) + 1, dtype=torch.float32)
    content = bytes(numbers.numpy())[:nbytes]

    def read(window: memoryview) -> None:
        window[:] = content

    with HostFiller().create(nbytes) as chunk:
        chunk.write(0, nbytes, Rows(0, nbytes), read)
        chunk.finish()
        fd = chunk.fd.duplicate()
        undo.callback(fd.close)
    HostKeeper().seal(fd.fileno(), nbytes)
    return fd
