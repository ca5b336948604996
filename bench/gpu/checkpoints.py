"""Checkpoints that cost little time and disk to make, and what their bytes should be.

*Sparse*: one file with holes, in which only the first `HEAD` bytes of every tensor are written. It
is real for the whole chain (headers, offsets, reads, digests) and costs neither disk nor, on a
tmpfs, memory; holes are read at the speed of memory, or nearly. Nothing that is measured after the
load depends on what the bytes are.

*Dense*: every byte written, and different in every tensor: each is a window at another place of one
random block. Values are finite bf16 numbers between 1/128 and 2, so that results can be compared.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from blake3 import blake3

HEAD = 4096
GIB = 1 << 30
WIDTH = 4096
"""Columns of a dense checkpoint's matrices: 32 MiB for a square one."""

BLOCK = 64 << 20
THREADS = 16
_CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
_SEED = 20_250_101


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor of a file lies; offsets from the file's start."""

    name: str
    path: Path
    start: int
    nbytes: int


def sparse(folder: Path, tensors: int, nbytes: int) -> Path:
    """A checkpoint of `tensors` equal matrices, at least `nbytes` together, in one sparse file."""
    rows = -(-nbytes // (tensors * 2 * 1024))
    shapes = {f"layers.{n}.weight": (rows, 1024) for n in range(tensors)}
    folder.mkdir(parents=True)
    path = folder / "model.safetensors"
    start = _begin(path, shapes)
    with path.open("r+b") as file:
        for number in range(tensors):
            file.seek(start + number * rows * 2048)
            file.write(head_of(number))
        file.truncate(start + tensors * rows * 2048)
    _finish(folder)
    return folder


def head_of(number: int) -> bytes:
    """The first bytes of tensor `number` of a sparse checkpoint."""
    return bytes(_window(number, HEAD))


def dense(folder: Path, files: int, nbytes: int) -> Path:
    """A checkpoint of `files` shards of `nbytes` together; the one that is there, if it is whole.

    Each has matrices of 32 MiB and, as models do, some vectors of 8 KiB between them. Written
    through the page cache, then out to the disk.
    """
    made = folder / ".made"
    if made.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    matrices = nbytes // files // (2 * WIDTH * WIDTH)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: _write_shard(folder, n, files, matrices), range(files)))
    _finish(folder)
    made.touch()
    return folder


def part_of(whole: Path, folder: Path, files: int) -> Path:
    """The first `files` shards of a dense checkpoint as one of its own, by links."""
    if not folder.exists():
        folder.mkdir(parents=True)
        for path in shards(whole)[:files]:
            (folder / path.name).symlink_to(path)
        _finish(folder)
    return folder


def shards(folder: Path) -> list[Path]:
    """The weight files of a checkpoint, in order."""
    return sorted(folder.glob("*.safetensors"))


def tensors_of(folder: Path) -> list[Tensor]:
    """Every tensor, as the headers of the files say."""
    return [tensor for path in shards(folder) for tensor in _tensors_in(path)]


def digests(folder: Path) -> dict[str, str]:
    """BLAKE3 of every tensor's bytes, read from the files."""

    def digest(tensor: Tensor) -> tuple[str, str]:
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            return tensor.name, blake3(file.read(tensor.nbytes)).hexdigest()

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return dict(pool.map(digest, tensors_of(folder)))


def evict(paths: Sequence[Path]) -> float:
    """Drop files from the page cache; the share of them that is still in it, 0 to 1."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident(paths)


def resident(paths: Sequence[Path]) -> float:
    """The share of these files that is in the page cache, 0 to 1."""
    pages = [_resident_pages(path) for path in paths]
    return sum(there for there, _ in pages) / max(1, sum(of for _, of in pages))


def _write_shard(folder: Path, number: int, files: int, matrices: int) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(matrices):
        shapes[f"layers.{number}.{index}.weight"] = (WIDTH, WIDTH)
        shapes[f"layers.{number}.{index}.norm"] = (WIDTH,)
    path = folder / f"model-{number + 1:05}-of-{files:05}.safetensors"
    start = _begin(path, shapes)
    with path.open("r+b") as file:
        file.seek(start)
        for index, shape in enumerate(shapes.values()):
            place = number * len(shapes) + index
            file.write(_window(place, 2 * int(np.prod(shape))))
        file.flush()
        os.fsync(file.fileno())


def _window(place: int, nbytes: int) -> memoryview:
    """Bytes that no other `place` has: the block, from another value on."""
    start = 2 * (place * 1_000_003 % (BLOCK // 2))
    return memoryview(_block())[start : start + nbytes]


@cache
def _block() -> bytes:
    """Random bf16 values, twice over: sign, three bits of the exponent and mantissa are random."""
    random = np.random.default_rng(_SEED).integers(0, 1 << 16, BLOCK // 2, dtype=np.uint16)
    values = (random & 0x83FF) | 0x3C00
    return values.tobytes() * 2


def _begin(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Write the header of a file of bf16 tensors; where its data starts."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return 8 + len(text)


def _tensors_in(path: Path) -> Iterator[Tensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, told in header.items():
        if name != "__metadata__":
            first, end = told["data_offsets"]
            yield Tensor(name, path, 8 + length + first, end - first)


def _finish(folder: Path) -> None:
    """What makes files of weights a checkpoint: configuration, and an index of several shards."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    found = tensors_of(folder)
    if len(shards(folder)) > 1:
        total = sum(tensor.nbytes for tensor in found)
        homes = {tensor.name: tensor.path.name for tensor in found}
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _resident_pages(path: Path) -> tuple[int, int]:
    """Pages of a file in the page cache, and all of its pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        there = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), there
        )
        del first  # it keeps the mapping from being closed
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        return int(np.count_nonzero(np.frombuffer(there, np.uint8) & 1)), pages
