"""Which bytes of a tensor stand for it. Pure, and part of what `sampled-1` means."""

from __future__ import annotations

from blake3 import blake3

from preloadd.weights.checkpoint.layout import TensorInfo

WINDOW = 4096
"""Bytes of one window: a page, which is what a disk reads anyway."""

WINDOWS = 8
"""Windows of a large tensor: its head, its tail, and one in each of six equal stretches between."""

SAMPLE = WINDOW * WINDOWS
"""The most bytes that stand for one tensor."""


def windows(tensor: TensorInfo) -> list[tuple[int, int]]:
    """(offset in the file, bytes) of every window, ascending; a small tensor is one window."""
    if tensor.nbytes <= SAMPLE:
        return [(tensor.start, tensor.nbytes)]
    inner = WINDOWS - 2
    head, tail = tensor.start, tensor.end - WINDOW
    stretch = (tail - head - WINDOW) // inner
    seed = blake3(tensor.name.encode() + tensor.nbytes.to_bytes(8, "little")).digest(8 * inner)
    places = [
        head + WINDOW + index * stretch + draw % stretch
        for index, draw in enumerate(_integers(seed))
    ]
    return [(place, WINDOW) for place in (head, *places, tail)]


def _integers(seed: bytes) -> list[int]:
    return [int.from_bytes(seed[at : at + 8], "little") for at in range(0, len(seed), 8)]
