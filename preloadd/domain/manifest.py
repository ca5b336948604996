"""The manifest: what lies where in an arena. Columnar, and checked in bulk.

It stands on the attach path: 4,000 entries as objects would cost 15 ms, as columns they cost one.
A *storage* is a run of bytes in a chunk, stored once; tensors are strided views of storages, so
that tied and overlapping tensors keep their identity. Encoding is `protocol.payload`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from preloadd.domain import dtypes
from preloadd.domain.files import FileIdentity
from preloadd.domain.recipe import Recipe
from preloadd.errors import DamagedManifest

ALIGNMENT = 512
"""Storages start at multiples of this many bytes: enough for CUDA's widest loads and TMA."""

MAX_CHUNKS = 128
"""So that every descriptor of a generation fits one packet (the kernel's limit is 253)."""

MAX_ARENA_BYTES = 1 << 48
"""More than any device has, and few enough for every sum of sizes to be a number in C."""

MAX_TENSORS = 1_000_000
MAX_ARTIFACT_BYTES = 16 << 20


class Kind(IntEnum):
    """What a name is in the model. A hidden tensor lies in a plain object, unknown to torch."""

    PARAMETER = 0
    BUFFER = 1
    NON_PERSISTENT_BUFFER = 2
    HIDDEN = 3


@dataclass(frozen=True, slots=True)
class Artifact:
    """Something small that belongs to the weights and travels in the manifest itself."""

    kind: str
    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Storages:
    """Runs of bytes: chunk index, offset in it, length in bytes. Sorted by (chunk, offset)."""

    chunk: list[int]
    offset: list[int]
    nbytes: list[int]


@dataclass(frozen=True, slots=True)
class Tensors:
    """One row a tensor. `dtype` holds codes of `dtypes.NAMES`; `strides` is None where contiguous.

    `shape`, `strides` and `skip` count elements; `skip` is the offset from the storage's start.
    """

    name: list[str]
    kind: list[int]
    dtype: list[int]
    shape: list[tuple[int, ...]]
    strides: list[tuple[int, ...] | None]
    storage: list[int]
    skip: list[int]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything an engine needs besides the chunks, and everything a rank needs to adopt them.

    `shards` are the identities of the weight files as they were read; `aliases` maps further names
    to the name they are the same object as; `attributes` holds Python-side flags by dotted path;
    `counters` what the load that filled the arena cost.
    """

    generation: str
    layout: int
    backend: str
    chunks: tuple[int, ...]
    storages: Storages
    tensors: Tensors
    key: dict[str, str]
    recipe: Recipe
    shards: tuple[FileIdentity, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, bool | int | float | str] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages: what the tensors need, without padding."""
        return sum(self.storages.nbytes)

    def __len__(self) -> int:
        return len(self.tensors.name)

    def locate(self, name: str) -> tuple[int, int, int]:
        """Chunk, offset and length in bytes of the storage that `name` is a view of."""
        row = self.tensors.name.index(self.aliases.get(name, name))
        storage = self.tensors.storage[row]
        return (
            self.storages.chunk[storage],
            self.storages.offset[storage],
            self.storages.nbytes[storage],
        )


def check(manifest: Manifest) -> None:
    """Prove that every view lies inside its storage and every storage inside its chunk.

    Raises DamagedManifest naming the first fault. After it, offsets can be used without looking.
    """
    for fault in _faults(manifest):
        raise DamagedManifest(f"manifest of generation {manifest.generation}: {fault}")


def _faults(manifest: Manifest) -> Iterator[str]:
    if not 1 <= len(manifest.chunks) <= MAX_CHUNKS or min(manifest.chunks) <= 0:
        yield f"{len(manifest.chunks)} chunks of {manifest.chunks[:3]}… bytes"
        return
    if sum(manifest.chunks) > MAX_ARENA_BYTES:
        yield f"chunks of {sum(manifest.chunks):,} bytes together: no device has as many"
        return
    yield from _storage_faults(manifest.storages, manifest.chunks)
    yield from _tensor_faults(manifest.tensors, len(manifest.storages.nbytes))
    yield from _view_faults(manifest.tensors, manifest.storages.nbytes)
    names = set(manifest.tensors.name)
    if len(names) != len(manifest.tensors.name):
        yield "a tensor is listed twice"
    for alias, name in manifest.aliases.items():
        if name not in names or alias in names:
            yield f"alias {alias!r} of {name!r}"
    if sum(len(artifact.data) for artifact in manifest.artifacts) > MAX_ARTIFACT_BYTES:
        yield f"artifacts over {MAX_ARTIFACT_BYTES} bytes"


def _storage_faults(storages: Storages, chunks: tuple[int, ...]) -> Iterator[str]:
    if not len(storages.chunk) == len(storages.offset) == len(storages.nbytes):
        yield "storage columns of different lengths"
        return
    previous_chunk, previous_end = 0, 0
    for index, (chunk, offset, nbytes) in enumerate(
        zip(storages.chunk, storages.offset, storages.nbytes, strict=True)
    ):
        if not 0 <= chunk < len(chunks):
            yield f"storage {index} lies in chunk {chunk} of {len(chunks)}"
            return
        if chunk < previous_chunk or (chunk == previous_chunk and offset < previous_end):
            yield f"storage {index} overlaps the one before it or is out of order"
            return
        if offset % ALIGNMENT or nbytes < 0 or offset < 0 or offset + nbytes > chunks[chunk]:
            yield f"storage {index} at {offset}+{nbytes} does not fit chunk {chunk}"
            return
        previous_chunk, previous_end = chunk, offset + nbytes


def _tensor_faults(tensors: Tensors, storages: int) -> Iterator[str]:
    rows = len(tensors.name)
    columns = (tensors.kind, tensors.dtype, tensors.shape, tensors.strides)
    if rows > MAX_TENSORS or any(
        len(column) != rows for column in (*columns, tensors.storage, tensors.skip)
    ):
        yield "tensor columns of different lengths, or too many tensors"
        return
    if not rows:
        return
    if min(tensors.kind) < 0 or max(tensors.kind) >= len(Kind):
        yield "an unknown kind of tensor"
    if min(tensors.dtype) < 0 or max(tensors.dtype) >= len(dtypes.NAMES):
        yield "an unknown dtype code"
    if min(tensors.storage) < 0 or max(tensors.storage) >= storages:
        yield "a tensor in a storage that is not there"
    if min(tensors.skip) < 0:
        yield "a negative offset into a storage"


def _view_faults(tensors: Tensors, storage_nbytes: list[int]) -> Iterator[str]:
    bits = [dtypes.BITS[name] for name in dtypes.NAMES]
    # Models have few layouts: each is looked at once, which takes most of the time of a check.
    reaches: dict[tuple[tuple[int, ...], tuple[int, ...] | None], int] = {}
    rows = zip(
        zip(tensors.shape, tensors.strides, strict=True),
        tensors.dtype,
        tensors.storage,
        tensors.skip,
        strict=True,
    )
    for index, (layout, dtype, storage, skip) in enumerate(rows):
        reach = reaches.get(layout)
        if reach is None:
            if fault := _layout_fault(*layout):
                yield f"{tensors.name[index]} has {fault}"
                return
            reach = reaches[layout] = _reach(*layout)
        width = bits[dtype]
        if skip * width % 8:
            yield f"{tensors.name[index]} starts inside a byte of its storage"
            return
        if (skip + reach) * width > storage_nbytes[storage] * 8:
            yield f"{tensors.name[index]} reaches past the end of its storage"
            return


def _layout_fault(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> str:
    """What is wrong with a view, wherever it lies; '' if nothing is."""
    if shape and min(shape) < 0:
        return f"shape {shape}"
    # One without elements, or with strides of 0, needs no memory for all that it counts.
    if math.prod(filter(None, shape)) > MAX_ARENA_BYTES:
        return f"shape {shape}"
    if strides is not None and (len(strides) != len(shape) or not _are_strides(strides)):
        return f"strides {strides} for shape {shape}"
    return ""


def _reach(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> int:
    """Elements from the first of a view to behind its last."""
    extent = math.prod(shape)
    if strides is None or not extent:
        return extent
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _are_strides(strides: tuple[int, ...]) -> bool:
    return not strides or (min(strides) >= 0 and max(strides) <= MAX_ARENA_BYTES)
