"""Checkpoints that exist in memory only, and the way back from what ranks hold to whole tensors.

Elements are arrays of bits, so that every dtype, packed ones too, is compared alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from preloadd.domain import dtypes
from preloadd.weights.plan import Run, Slice, Source

GAP = 24
"""Bytes before each tensor that belong to nobody: a read that strays finds them."""


@dataclass(frozen=True)
class Synthetic:
    """Tensors that lie in `files` as `sources` say."""

    sources: dict[str, Source]
    files: list[np.ndarray]

    def bits(self, name: str) -> np.ndarray:
        """A whole tensor, with one more axis for the bits of an element."""
        source = self.sources[name]
        data = self.files[source.file][source.start : source.start + source.nbytes]
        return elements(data, source.dtype, source.shape)

    def held(self, piece: Slice) -> np.ndarray:
        """What a rank reads for a slice, as `bits` gives the whole."""
        data = b"".join(self._row(run, row) for run in piece.runs for row in range(run.rows))
        assert len(data) == piece.nbytes
        return elements(np.frombuffer(data, np.uint8), piece.dtype, piece.shape)

    def _row(self, run: Run, row: int) -> bytes:
        start = run.offset + row * run.stride
        assert 0 <= start <= start + run.row_nbytes <= len(self.files[run.file])
        return self.files[run.file][start : start + run.row_nbytes].tobytes()

    def uses(self, pieces: Sequence[Slice]) -> list[np.ndarray]:
        """How often the pieces together read each byte of each file."""
        counted = [np.zeros(len(file), int) for file in self.files]
        for run in (run for piece in pieces for run in piece.runs):
            for row in range(run.rows):
                start = run.offset + row * run.stride
                counted[run.file][start : start + run.row_nbytes] += 1
        return counted

    def joined(self, pieces: Sequence[Slice]) -> np.ndarray:
        """The whole tensor from all its slices, by what the slices record and nothing else."""
        bits = dtypes.BITS[pieces[0].dtype]
        whole = np.full((*pieces[0].whole_shape, bits), 2, np.uint8)
        for piece in pieces:
            if piece.axis is None:
                whole[...] = self.held(piece)
                continue
            taken = [index for span in piece.spans for index in span]
            whole[(slice(None),) * piece.axis + (taken,)] = self.held(piece)
        return whole


def elements(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.unpackbits(data).reshape((*shape, dtypes.BITS[dtype]))


def synthesise(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> Synthetic:
    """Tensors of random bytes in two files, dealt in turns."""
    random = np.random.default_rng(len(shapes))
    sizes, sources = [0, 0], {}
    for index, (name, shape) in enumerate(shapes.items()):
        file = index % 2
        nbytes = dtypes.nbytes(dtype, math.prod(shape))
        sources[name] = Source(file, dtype, shape, sizes[file] + GAP, nbytes)
        sizes[file] += GAP + nbytes
    files = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    return Synthetic(sources, files)


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., Synthetic]:
    """Makes a `Synthetic` of shapes by name (and a dtype)."""
    return synthesise
