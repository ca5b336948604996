"""Torch's side of a manifest: dtypes, and tensors that are views of a mapped arena.

On ROCm torch calls its GPUs `cuda` too; so does this module.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from preloadd.domain import dtypes
from preloadd.domain.manifest import Manifest
from preloadd.errors import (
    ConfigError,
    DeviceFailed,
    OutOfRoom,
    PreloadError,
    UnsupportedModel,
)
from preloadd.linux.room import room as room_of_host
from preloadd.memory.api import DeviceBuffer
from preloadd.memory.status import HINT, OUT_OF_MEMORY, Room, out_of_room

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""By safetensors' name. F6_E2M3 and F6_E3M2 have no torch dtype. F4 packs two values a byte."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What a torch is built for (versions of CUDA and ROCm), and whether it sees a GPU of it."""

    torch: str
    cuda: str | None
    hip: str | None
    sees_gpu: bool


def platform() -> Platform:
    """That of this process."""
    return Platform(
        torch.__version__, torch.version.cuda, torch.version.hip, torch.cuda.is_available()
    )


def current_gpu() -> int:
    """Torch's number of the GPU it works on. There must be one."""
    return torch.cuda.current_device()


def device_name(device: str | int | torch.device | None) -> str:
    """A device as torch writes it: `cpu`, `cuda`, `cuda:1`; '' for None. A number is a GPU's.

    ConfigError if it is none.
    """
    if device is None:
        return ""
    try:
        return str(
            torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        )
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is none that torch knows: {error}") from None


def whole_chunk(buffer: memoryview | DeviceBuffer, device: str) -> torch.Tensor:
    """The bytes of a chunk as one uint8 tensor of shape (nbytes,) that shares its memory.

    `device` is where a DeviceBuffer lies. The tensor, and all views of it, keep the mapping.
    """
    return host_chunk(buffer) if isinstance(buffer, memoryview) else device_chunk(buffer, device)


def host_chunk(buffer: memoryview) -> torch.Tensor:
    """A chunk in host memory.

    It goes through numpy because numpy keeps the exporting object alive: `torch.frombuffer` does
    not, and an unmapping under a live tensor ends the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.frombuffer(buffer, np.uint8))


def device_chunk(buffer: DeviceBuffer, device: str) -> torch.Tensor:
    """A chunk in GPU memory; DeviceFailed where torch cannot use it as it is."""
    try:
        tensor = torch.as_tensor(buffer, device=torch.device(device))
    except RuntimeError as error:
        raise DeviceFailed(
            f"torch cannot use the weights mapped on {device}: {error}: see that it can use this "
            f"GPU at all, as with torch.empty(1, device={device!r}); else {HINT}"
        ) from error
    # as_tensor would copy to a device that is not the buffer's, without a word.
    if tensor.data_ptr() != buffer.address or tensor.shape != (buffer.nbytes,):
        raise DeviceFailed(
            f"torch copied mapped weights to {tensor.device} instead of using them where they "
            f"are: attach with the device on which they are mapped, {device} is another"
        )
    return tensor


def in_use(tensor: torch.Tensor) -> Callable[[], bool]:
    """A question for later: does any tensor still use the memory of this one?"""
    storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return lambda: not storage.expired()


def copies(chunks: Sequence[torch.Tensor], room: Room) -> list[torch.Tensor]:
    """Chunks of the engine's own with the same bytes.

    OutOfRoom, before anything is copied if a GPU cannot hold them all, with what `room` says.
    """
    wanted = sum(chunk.nbytes for chunk in chunks)
    if chunks and chunks[0].is_cuda and wanted > (free := _free(chunks[0].device)):
        raise OutOfRoom(wanted=wanted, free=free, limit=room()[1])
    with explained(room):
        return [chunk.clone() for chunk in chunks]


def _free(device: torch.device) -> int:
    """Bytes that torch can have on a GPU: `Room` asks NVML as well, which takes its time."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


@contextmanager
def explained(room: Room) -> Iterator[None]:
    """Give torch's errors of memory and of GPUs their meaning: OutOfRoom, with what `room` says of
    a GPU, or DeviceFailed. All else passes through."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        meaning = _meaning_of(error, room)
        if meaning is None:
            raise
        raise meaning from error


def _meaning_of(error: RuntimeError | MemoryError, room: Room) -> PreloadError | None:
    text = str(error) or type(error).__name__
    words = text.strip().partition("\n")[0]
    found = _TRIED.search(text)
    wanted = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if isinstance(error, torch.AcceleratorError):
        if getattr(error, "error_code", 0) != OUT_OF_MEMORY:
            return DeviceFailed(f"{words}: {HINT}")
    elif isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        bound = "a limit of the kernel (`ulimit -v`, or vm.overcommit_memory)"
        return out_of_room(room_of_host, wanted, words, bound, remedy=f"raise {bound}")
    elif not isinstance(error, torch.OutOfMemoryError):
        return None
    return out_of_room(room, wanted, words, "a limit of torch's own, or in pieces too small")


_TRIED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
"""How torch says what it asked for, on hosts and on GPUs."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def views(manifest: Manifest, chunks: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor of the manifest by name, as a view of `chunks` (uint8, one a chunk, any device).

    Aliases are the same object under a further name. Nothing is copied. UnsupportedModel names a
    tensor whose dtype torch does not have.
    """
    # On the attach path: each chunk is seen once as each dtype, then a tensor is a single call.
    columns, storages = manifest.tensors, manifest.storages
    bases: dict[tuple[int, int], torch.Tensor] = {}
    plain: dict[tuple[int, ...], list[int]] = {}
    found: dict[str, torch.Tensor] = {}
    rows = zip(
        columns.name,
        columns.dtype,
        columns.shape,
        columns.strides,
        columns.storage,
        columns.skip,
        strict=True,
    )
    for name, dtype, shape, strides, storage, skip in rows:
        chunk = storages.chunk[storage]
        base = bases.get((chunk, dtype))
        if base is None:
            base = bases[chunk, dtype] = _seen_as(chunks[chunk], dtypes.NAMES[dtype], name)
        if dtype == _PAIRS:
            shape = _in_pairs(name, shape, strides)  # noqa: PLW2901
        if 0 in shape:
            found[name] = torch.empty(shape, dtype=base.dtype, device=base.device)
            continue
        start = storages.offset[storage] + _BITS[dtype] * skip // 8
        if strides is None:
            strides = plain.get(shape) or plain.setdefault(shape, _contiguous(shape))  # noqa: PLW2901
        found[name] = base.as_strided(shape, strides, start // base.itemsize)
    for alias, name in manifest.aliases.items():
        found[alias] = found[name]
    return found


_PAIRS = dtypes.CODES["F4"]
_BITS = [dtypes.BITS[name] for name in dtypes.NAMES]


def _seen_as(chunk: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """All values of `dtype` that fit a chunk. Its first byte is aligned for any of them."""
    torch_dtype = DTYPES.get(dtype)
    if torch_dtype is None:
        raise UnsupportedModel(f"{name}: torch {torch.__version__} has no dtype for {dtype}")
    return chunk[: len(chunk) - len(chunk) % torch_dtype.itemsize].view(torch_dtype)


def _in_pairs(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The shape of packed values as torch counts them: safetensors counts each, torch pairs."""
    if strides is not None or not shape or shape[-1] % 2:
        raise UnsupportedModel(
            f"{name}: torch keeps F4 values in pairs, which shape {shape} does not allow"
        )
    return (*shape[:-1], shape[-1] // 2)


def _contiguous(shape: tuple[int, ...]) -> list[int]:
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    strides.reverse()
    return strides
