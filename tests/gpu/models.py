"""Checkpoints for the GPU's tests."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path

from preloadd.domain import dtypes
from tests.checkpoints import CONFIG, sparse

MATRICES = 3
SIDE = 256
MARK = 4096
"""Bytes at the start of each tensor of `marked` that are not zero."""


def mixed(folder: Path, *, seed: int = 0) -> Path:
    """A tensor of every dtype that torch knows, some without elements, and a few matrices."""
    rng = random.Random(seed)
    contents: dict[str, tuple[str, list[int], bytes]] = {}
    for dtype in dtypes.NAMES:
        if dtype.startswith("F6"):
            continue
        for shape in ([6, 4], [2, 3, 258]):
            elements = 24 if shape == [6, 4] else 2 * 3 * 258
            data = rng.randbytes(dtypes.nbytes(dtype, elements))
            if dtype == "BOOL":
                data = bytes(byte & 1 for byte in data)
            contents[f"model.{dtype}.{len(shape)}"] = (dtype, shape, data)
    contents["model.none.weight"] = ("BF16", [0, 7], b"")
    contents["model.none.scale"] = ("F8_E4M3", [3, 0], b"")
    contents["model.one"] = ("F32", [], rng.randbytes(4))
    for number in range(MATRICES):
        data = bytearray(rng.randbytes(2 * SIDE * SIDE))
        data[1::2] = b"\x3c" * (SIDE * SIDE)  # from 1 to 1.25
        contents[f"matrix.{number}"] = ("F16", [SIDE, SIDE], bytes(data))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write(folder / "model.safetensors", contents)
    return folder


def write(path: Path, contents: Mapping[str, tuple[str, list[int], bytes]]) -> None:
    """One shard: dtype as safetensors names it, shape and bytes of each tensor."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape, data) in contents.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(data for _, _, data in contents.values())


def marked(folder: Path, nbytes: int, tensors: int = 1) -> Path:
    """About `nbytes` that take no room on the disk but for a mark at the start of each tensor."""
    sparse(folder, nbytes, tensors)
    rng = random.Random(nbytes)
    with (folder / "model.safetensors").open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for number in range(tensors):
            os.pwrite(file.fileno(), rng.randbytes(MARK), start + number * (nbytes // tensors))
    return folder
