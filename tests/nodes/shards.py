"""What ranks hold, put together again without asking how it was divided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import safetensors

Tensors = Mapping[str, np.ndarray]
"""By name; the last axis counts the bytes of an element."""


def checkpoint(folder: Path) -> Tensors:
    """What safetensors itself reads from every file of `folder`."""
    return {
        name: _array(told["shape"], bytes(told["data"]))
        for shard in folder.glob("*.safetensors")
        for name, told in safetensors.deserialize(shard.read_bytes())
    }


def shard(path: Path) -> Tensors:
    """What an engine wrote down."""
    written = msgspec.msgpack.decode(path.read_bytes(), type=dict[str, tuple[list[int], bytes]])
    return {name: _array(shape, data) for name, (shape, data) in written.items()}


def wholes(parts: Sequence[Tensors], like: Tensors) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Every tensor, and all that the `parts` make of it: those of ranks with neighbouring numbers
    are put together until they are as large as in the checkpoint."""
    for name, whole in like.items():
        pieces = [part[name] for part in parts if name in part]
        axis, count = _cut(pieces, whole) if pieces else (0, 1)
        rows = [pieces[n : n + count] for n in range(0, len(pieces), count)]
        yield name, [np.concatenate(row, axis) for row in rows]


def differing(parts: Sequence[Tensors], like: Tensors) -> list[str]:
    """The tensors that the parts do not make, or not of the right bytes."""
    return [
        name
        for name, found in wholes(parts, like)
        if not found or any(not np.array_equal(each, like[name]) for each in found)
    ]


def _cut(pieces: Sequence[np.ndarray], whole: np.ndarray) -> tuple[int, int]:
    """Along which axis a tensor is in several parts, and in how many."""
    shapes = zip(whole.shape, pieces[0].shape, strict=True)
    cuts = [(axis, large // small) for axis, (large, small) in enumerate(shapes) if large != small]
    (found,) = cuts or [(0, 1)]
    return found


def _array(shape: Sequence[int], data: bytes) -> np.ndarray:
    width = len(data) // math.prod(shape) if data else 0
    return np.frombuffer(data, np.uint8).reshape((*shape, width))
