"""Torch's side of a manifest: dtypes, and tensors that are views of a mapped arena."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from preloadd.domain import dtypes
from preloadd.domain.manifest import Manifest
from preloadd.errors import UnsupportedModel

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


def host_chunk(buffer: memoryview) -> torch.Tensor:
    """The bytes of a chunk as one uint8 tensor of shape (nbytes,) that shares its memory.

    It goes through numpy because numpy keeps the exporting object alive: `torch.frombuffer` does
    not, and an unmapping under a live tensor ends the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.frombuffer(buffer, np.uint8))


def views(manifest: Manifest, chunks: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor of the manifest by name, as a view of `chunks` (uint8, one a chunk, any device).

    Aliases are the same object under a further name. Nothing is copied. UnsupportedModel names a
    tensor whose dtype torch does not have.
    """
    tensors = manifest.tensors
    storages = manifest.storages
    found: dict[str, torch.Tensor] = {}
    for row, name in enumerate(tensors.name):
        dtype_name = dtypes.NAMES[tensors.dtype[row]]
        storage = tensors.storage[row]
        start = storages.offset[storage] + dtypes.BITS[dtype_name] * tensors.skip[row] // 8
        found[name] = view(
            chunks[storages.chunk[storage]],
            start,
            name=name,
            dtype=dtype_name,
            shape=tensors.shape[row],
            strides=tensors.strides[row],
        )
    for alias, name in manifest.aliases.items():
        found[alias] = found[name]
    return found


def view(
    chunk: torch.Tensor,
    start: int,
    *,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> torch.Tensor:
    """One tensor over `chunk` from byte `start` on; shape and strides in elements of `dtype`."""
    torch_dtype = DTYPES.get(dtype)
    if torch_dtype is None:
        raise UnsupportedModel(f"{name}: torch {torch.__version__} has no dtype for {dtype}")
    if dtype == "F4":
        # torch counts pairs of values, safetensors counts values.
        if strides is not None or not shape or shape[-1] % 2:
            raise UnsupportedModel(
                f"{name}: torch keeps F4 values in pairs, which shape {shape} does not allow"
            )
        shape = (*shape[:-1], shape[-1] // 2)
    if not math.prod(shape):
        return torch.empty(shape, dtype=torch_dtype, device=chunk.device)
    if strides is None:
        end = start + math.prod(shape) * torch_dtype.itemsize
        return chunk[start:end].view(torch_dtype).view(shape)
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    base = chunk[start : start + extent * torch_dtype.itemsize].view(torch_dtype)
    return base.as_strided(shape, strides, base.storage_offset())
