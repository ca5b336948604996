"""The header of one safetensors file: 8 bytes of length (little-endian), then JSON, then data."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from preloadd.domain.files import FileIdentity
from preloadd.errors import CheckpointError
from preloadd.weights.checkpoint import lfs
from preloadd.weights.checkpoint.identity import identify
from preloadd.weights.checkpoint.layout import TensorInfo, parse
from preloadd.weights.checkpoint.reading import opened, read_at

MAX_HEADER = 100_000_000
"""Bytes of JSON that safetensors itself accepts."""

_REMEDY = "The file is damaged or was not fully written: download or save it again"

_LENGTH = 8
_THREADS = 8


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What a shard holds and where. `digest` is the BLAKE3 of all bytes before `data_start`.

    `identity` is that of the file the header was read from; offsets count from the file's start.
    """

    path: Path
    identity: FileIdentity
    data_start: int
    digest: bytes
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> ShardHeader:
    """The header of the shard at `path`; reads nothing of its data.

    CheckpointError names the file, the tensor and the fault; ReadFailed if the system refuses.
    """
    lfs.refuse_pointers((path,))
    with opened(path) as fd:
        identity = identify(fd)
        try:
            data_start = _LENGTH + _header_nbytes(fd, identity.size, path)
            raw = read_at(fd, data_start, 0, path)
            tensors = parse(raw[_LENGTH:], data_start, identity.size)
        except CheckpointError as fault:
            raise CheckpointError(f"{path}: {fault}. {_REMEDY}") from None
    return ShardHeader(path, identity, data_start, blake3(raw).digest(), tensors)


def read_headers(paths: Iterable[Path]) -> tuple[ShardHeader, ...]:
    """The headers of all shards, in order; Git-LFS pointers among them are named all at once."""
    paths = tuple(paths)
    lfs.refuse_pointers(paths)
    if len(paths) == 1:
        return (read_header(paths[0]),)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="headers") as pool:
        return tuple(pool.map(read_header, paths))


def _header_nbytes(fd: int, file_nbytes: int, path: Path) -> int:
    if file_nbytes < _LENGTH:
        raise CheckpointError(
            "the file is empty"
            if not file_nbytes
            else f"the file has {file_nbytes} bytes, too few for a safetensors file"
        )
    nbytes = int.from_bytes(read_at(fd, _LENGTH, 0, path), "little")
    if nbytes > MAX_HEADER:
        raise CheckpointError(
            f"its first 8 bytes give a header of {nbytes:,} bytes, over the {MAX_HEADER:,} that "
            "safetensors allows, so this is no safetensors file"
        )
    if nbytes > file_nbytes - _LENGTH:
        raise CheckpointError(
            f"the file is truncated: its header ends at byte {_LENGTH + nbytes:,}, "
            f"the file at {file_nbytes:,}"
        )
    return nbytes
