"""Checkpoints on disk, small and made to order."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from preloadd.weights.checkpoint import identify


def pack(header: object, data: bytes = b"") -> bytes:
    """A safetensors file. `header` is bytes as they are, or anything that becomes JSON."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def pack_tensors(tensors: Mapping[str, bytes]) -> bytes:
    """A safetensors file of flat U8 tensors."""
    header, position = {}, 0
    for name, data in tensors.items():
        end = position + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [position, end]}
        position = end
    return pack(header, b"".join(tensors.values()))


class Maker:
    """Writes checkpoints below one folder."""

    pack = staticmethod(pack)
    pack_tensors = staticmethod(pack_tensors)

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(
        self,
        name: str,
        shards: Mapping[str, Mapping[str, bytes]],
        index: Mapping[str, str] | None = None,
        config: bytes | None = b'{"architectures": ["LlamaForCausalLM"]}',
    ) -> Path:
        """A folder with these shards, and the index and configuration unless None."""
        folder = self.root / name
        folder.mkdir()
        for shard, tensors in shards.items():
            (folder / shard).write_bytes(pack_tensors(tensors))
        if index is not None:
            content = json.dumps({"metadata": {}, "weight_map": index})
            (folder / "model.safetensors.index.json").write_text(content)
        if config is not None:
            (folder / "config.json").write_bytes(config)
        return folder

    def rewrite(self, path: Path, content: bytes) -> None:
        """Replace the content in place. Returns once the kernel's coarse clock shows it."""
        before = identify(path)
        while identify(path) == before:
            time.sleep(0.001)
            path.write_bytes(content)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path)
