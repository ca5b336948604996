"""From the header of a safetensors file to its tensors. Pure.

Stands on the rules of safetensors 0.8 and accepts nothing that library refuses. It is stricter in
two things, which no writer does: a key written twice (the format forbids it, the library takes the
last) and fields besides the three that a tensor has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from preloadd.domain import dtypes
from preloadd.errors import CheckpointError

METADATA = "__metadata__"
"""The one name in a header that is no tensor."""

_MAX_USIZE = (1 << 64) - 1
"""Where the library's own arithmetic overflows, and so what it refuses."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: dtype by safetensors' name, and the bytes of the file it takes, end excluded."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.start


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_Entry)
_metadata = msgspec.json.Decoder(dict[str, str] | None)


def parse(header: bytes, data_start: int, file_nbytes: int) -> dict[str, TensorInfo]:
    """The tensors that `header` describes, in the order of their bytes in the file.

    `data_start` is the offset at which the data section starts. Raises CheckpointError with the
    tensor and the fault unless the tensors fill the file from there to its end without a hole.
    """
    entries = _entries(header)
    tensors = {}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        _check_place(name, entry, position)
        tensors[name] = TensorInfo(
            name, entry.dtype, entry.shape, data_start + begin, data_start + end
        )
        position = end
    _check_end(position, file_nbytes - data_start)
    return tensors


def _check_place(name: str, entry: _Entry, position: int) -> None:
    begin, end = entry.data_offsets
    if begin != position:
        how = "leaves a hole after" if begin > position else "overlaps"
        raise CheckpointError(
            f"tensor {name!r} starts at byte {begin:,} of the data and {how} "
            f"the tensor before it, which ends at {position:,}"
        )
    wanted = _nbytes(name, entry)
    if end - begin != wanted:
        raise CheckpointError(
            f"tensor {name!r} takes bytes {begin:,} to {end:,}, "
            f"but {entry.dtype} of shape {list(entry.shape)} needs {wanted:,} bytes"
        )


def _nbytes(name: str, entry: _Entry) -> int:
    elements = 1
    for size in entry.shape:
        # The library multiplies in this order, so a zero saves only what comes after it.
        elements *= size
        if max(size, elements) > _MAX_USIZE:
            raise CheckpointError(f"tensor {name!r} has the impossible shape {list(entry.shape)}")
    if elements * dtypes.BITS[entry.dtype] > _MAX_USIZE:
        raise CheckpointError(f"tensor {name!r} has the impossible shape {list(entry.shape)}")
    try:
        return dtypes.nbytes(entry.dtype, elements)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {name!r}: {error}") from None


def _check_end(position: int, data_nbytes: int) -> None:
    if position > data_nbytes:
        raise CheckpointError(
            f"the file is truncated: its tensors take {position:,} bytes, {data_nbytes:,} are there"
        )
    if position < data_nbytes:
        raise CheckpointError(f"{data_nbytes - position:,} trailing bytes follow its last tensor")


def _entries(header: bytes) -> dict[str, _Entry]:
    try:
        raws = _header.decode(header)
        pairs = 4 * len(raws)
        if METADATA in raws:
            pairs += len(_metadata.decode(raws.pop(METADATA)) or ()) - 3
    except RecursionError:
        raise CheckpointError("its header is nested without end") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"its header cannot be read: {error}") from None
    entries = {name: _entry_of(name, raw) for name, raw in raws.items()}
    if header.count(b":") != pairs:
        # One colon follows every key. Equal counts prove that the decoder dropped no repeated key;
        # unequal ones may also come from colons in names, so look closely.
        json.loads(header.decode(), object_pairs_hook=_without_repetition)
    return entries


def _entry_of(name: str, raw: msgspec.Raw) -> _Entry:
    try:
        entry = _entry.decode(raw)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the header's entry of tensor {name!r}: {error}") from None
    if entry.dtype not in dtypes.BITS:
        raise CheckpointError(f"tensor {name!r} has the unknown dtype {entry.dtype!r}")
    if b"-" in bytes(raw):
        # The decoder takes -0 for 0, safetensors does not.
        raise CheckpointError(f"tensor {name!r} has a negative size or offset: {bytes(raw)!r}")
    return entry


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"its header has {name!r} twice")
        found[name] = value
    return found
