"""Which files of a folder are the checkpoint: the index's where there is one, else by their names.

A folder may hold the same weights twice (`consolidated.safetensors` beside shards), so what is no
part of the checkpoint is as important here as what is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from preloadd.domain.files import FileIdentity
from preloadd.errors import CheckpointError, ReadFailed
from preloadd.weights.checkpoint.identity import identify
from preloadd.weights.checkpoint.lfs import refuse_pointers
from preloadd.weights.checkpoint.reading import missing, opened, read_at, refused

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MAX_DOCUMENT = 100_000_000
"""Bytes of a file that is read whole: far more than the index of any model has."""

_SUFFIX = ".safetensors"
_CONSOLIDATED = "consolidated"
_OTHER_FORMATS = (".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
_MAX_NAMES_TOLD = 20
_AGAIN = "The file is damaged or half-written: download or save it again"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


_index = msgspec.json.Decoder(_Index)


@dataclass(frozen=True, slots=True)
class Document:
    """A small file read whole. `identity` is that of the file the bytes came from."""

    path: Path
    identity: FileIdentity
    content: bytes


@dataclass(frozen=True, slots=True)
class Survey:
    """The files that are a checkpoint. `homes` gives each tensor's shard; None without an index.

    `shards` are names inside `folder`, sorted.
    """

    folder: Path
    index: Document | None
    homes: Mapping[str, str] | None
    shards: tuple[str, ...]

    @property
    def config(self) -> Path:
        """Where `config.json` has to be."""
        return self.folder / CONFIG

    @property
    def shard_paths(self) -> tuple[Path, ...]:
        """Where the shards are."""
        return tuple(self.folder / name for name in self.shards)


def survey(folder: Path) -> Survey:
    """Look which files are the checkpoint in `folder`; reads the index and nothing else.

    CheckpointError if there is none, or if the index does not fit the files that are there.
    """
    names = _names(folder)
    if INDEX not in names:
        return Survey(folder, None, None, pick_shards(folder, names))
    document = read_document(folder / INDEX)
    homes = parse_index(document)
    shards = tuple(sorted(set(homes.values())))
    absent = [name for name in shards if name not in names]
    if absent:
        raise CheckpointError(
            f"{document.path} names {len(absent)} file(s) that are not there: {_list(absent)}. "
            "Download the rest of the model, or the index that belongs to these files"
        )
    return Survey(folder, document, homes, shards)


def identities_of(folder: Path) -> tuple[FileIdentity, ...]:
    """Identities of every file that the checkpoint is, sorted: shards, index, `config.json`.

    What a recipe compares. Reads the index and no header. CheckpointError as `survey`.
    """
    found = survey(folder)
    return tuple(sorted((*_weights_identities(found), _identity(found.config))))


def weights_identities_of(folder: Path) -> tuple[FileIdentity, ...]:
    """Identities of the files that decide the bytes of every tensor, sorted: shards and index.

    What stands for equal content when keys are compared, where what counts of `config.json` has
    fields of its own. The index is among them because it says from which shard a tensor comes.
    """
    return tuple(sorted(_weights_identities(survey(folder))))


def _weights_identities(found: Survey) -> list[FileIdentity]:
    index = [found.index.identity] if found.index else []
    return index + [_identity(path) for path in found.shard_paths]


def _identity(path: Path) -> FileIdentity:
    try:
        return identify(path)
    except FileNotFoundError:
        raise CheckpointError(missing(path)) from None
    except OSError as error:
        raise ReadFailed(refused(path, error)) from error


def read_document(path: Path) -> Document:
    """A small file read whole; CheckpointError if it is missing, a Git-LFS pointer or not small."""
    refuse_pointers((path,))
    with opened(path) as fd:
        identity = identify(fd)
        if identity.size > MAX_DOCUMENT:
            raise CheckpointError(
                f"{path} has {identity.size:,} bytes, over the {MAX_DOCUMENT:,} that are read. "
                f"{_AGAIN}"
            )
        return Document(path, identity, read_at(fd, identity.size, 0, path))


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of the checkpoint in `folder`, parsed; CheckpointError, ReadFailed."""
    return parse_config(read_document(folder / CONFIG))


@contextmanager
def config_of(folder: Path) -> Iterator[None]:
    """Name the folder in faults of `config.json` that pure code finds without knowing it."""
    try:
        yield
    except CheckpointError as fault:
        if not str(fault).startswith(f"{CONFIG}:"):
            raise
        raise CheckpointError(f"{folder}/{fault}") from None


def parse_config(document: Document) -> dict[str, Any]:
    """The JSON object in `config.json`, or CheckpointError naming the file and the place. Pure."""
    try:
        # Python's own decoder: configs in the wild contain Infinity, which JSON does not know.
        config = json.loads(document.content.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{document.path} is no valid JSON: {error}. {_AGAIN}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{document.path} holds no JSON object. {_AGAIN}")
    return config


def parse_index(document: Document) -> dict[str, str]:
    """Tensor name to file name as the index says, or CheckpointError naming the fault. Pure."""
    try:
        homes = _index.decode(document.content).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{document.path} cannot be read: {error}. {_AGAIN}") from None
    if not homes:
        raise CheckpointError(f"{document.path} names no tensors. {_AGAIN}")
    for name, home in homes.items():
        if home in ("", ".", "..") or "/" in home or "\0" in home:
            raise CheckpointError(
                f"{document.path} places tensor {name!r} in {home!r}: only plain names of files "
                "in the same folder are read, so do not trust this checkpoint"
            )
    return homes


def pick_shards(folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """The shards among `names` of a folder without an index, sorted; CheckpointError if none. Pure.

    Hidden files are none: some archivers leave `._model.safetensors` beside the real one.
    """
    if SINGLE in names:
        return (SINGLE,)
    ours = [name for name in names if name.endswith(_SUFFIX) and not name.startswith(".")]
    shards = tuple(sorted(name for name in ours if not name.startswith(_CONSOLIDATED)))
    if shards:
        return shards
    others = sorted(name for name in names if name.endswith(_OTHER_FORMATS))
    if ours:
        told = f"has only {_list(sorted(ours))}, whose layout is not that of Hugging Face"
    elif others:
        told = f"has only {_list(others)}, and only safetensors are read"
    else:
        told = "has no .safetensors files"
    raise CheckpointError(
        f"{folder} {told}: download the safetensors of the model, or convert it with "
        "`save_pretrained` of transformers"
    )


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208 - names are wanted, not paths
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no such folder: correct the path") from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file: give the folder it is in") from None
    except OSError as error:
        raise ReadFailed(refused(folder, error)) from error


def _list(names: Collection[str]) -> str:
    told = ", ".join(list(names)[:_MAX_NAMES_TOLD])
    return (
        told if len(names) <= _MAX_NAMES_TOLD else f"{told} and {len(names) - _MAX_NAMES_TOLD} more"
    )
