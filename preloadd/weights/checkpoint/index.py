"""A checkpoint: a folder resolved to its configuration, its shards and every tensor's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preloadd.domain.files import FileIdentity
from preloadd.errors import CheckpointError
from preloadd.weights.checkpoint.folder import (
    INDEX,
    parse_config,
    read_document,
    survey,
)
from preloadd.weights.checkpoint.header import ShardHeader, read_headers
from preloadd.weights.checkpoint.layout import TensorInfo


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and the shard that holds it; offsets in `info` count from the shard's first byte."""

    shard: ShardHeader
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder holds, as it was when it was opened; no descriptor is kept.

    `tensors` has every name once, whichever shards repeat it. `config_bytes` is `config.json` as
    written, `config` the same parsed.
    """

    folder: Path
    config: Mapping[str, Any]
    config_bytes: bytes
    shards: tuple[ShardHeader, ...]
    tensors: Mapping[str, StoredTensor]
    config_identity: FileIdentity
    index_identity: FileIdentity | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.info.nbytes for stored in self.tensors.values())

    def nbytes_by_dtype(self) -> dict[str, int]:
        """Bytes stored in each dtype, by safetensors' name."""
        found: dict[str, int] = {}
        for stored in self.tensors.values():
            found[stored.info.dtype] = found.get(stored.info.dtype, 0) + stored.info.nbytes
        return found

    def identities(self) -> tuple[FileIdentity, ...]:
        """Identities of shards, index and `config.json`, sorted; as `identities_of` gives them."""
        return tuple(sorted((*self.weights_identities(), self.config_identity)))

    def weights_identities(self) -> tuple[FileIdentity, ...]:
        """Identities of shards and index, sorted; as `weights_identities_of` gives them."""
        index = (self.index_identity,) if self.index_identity else ()
        return tuple(sorted((*index, *(shard.identity for shard in self.shards))))


def open_checkpoint(path: Path) -> Checkpoint:
    """Resolve the folder at `path`; reads its configuration, its index and its shards' headers.

    CheckpointError names the file, the tensor, the fault and the remedy; ReadFailed if the system
    refuses to read.
    """
    found = survey(path)
    document = read_document(found.config)
    config = parse_config(document)
    shards = read_headers(found.shard_paths)
    tensors = gather(shards) if found.homes is None else place(found.homes, shards)
    return Checkpoint(
        path,
        config,
        document.content,
        shards,
        tensors,
        document.identity,
        found.index.identity if found.index else None,
    )


def place(homes: Mapping[str, str], shards: Sequence[ShardHeader]) -> dict[str, StoredTensor]:
    """Every tensor from the shard that `homes` names, and from no other. Pure.

    CheckpointError if that shard does not have it.
    """
    by_name = {shard.path.name: shard for shard in shards}
    tensors = {}
    for name, home in homes.items():
        shard = by_name[home]
        if name not in shard.tensors:
            raise CheckpointError(
                f"{shard.path.parent / INDEX} places tensor {name!r} in {home}, which does not "
                "have it: download the index and the shards again, from one revision"
            )
        tensors[name] = StoredTensor(shard, shard.tensors[name])
    return tensors


def gather(shards: Sequence[ShardHeader]) -> dict[str, StoredTensor]:
    """Every tensor of every shard. Pure.

    CheckpointError if two shards have the same one, or no shard has any.
    """
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, info in shard.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} is both in {tensors[name].shard.path} and in {shard.path}: "
                    f"remove the file that is no part of the model, or add its {INDEX}"
                )
            tensors[name] = StoredTensor(shard, info)
    if not tensors:
        raise CheckpointError(f"{shards[0].path} holds no tensors: download or save it again")
    return tensors
