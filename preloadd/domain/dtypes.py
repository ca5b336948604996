"""Element types, by the names safetensors writes in its headers.

Source: the `Dtype` enum of safetensors 0.8 (`safetensors/src/tensor.rs`), which gives the bits.
"""

from __future__ import annotations

from preloadd.errors import CheckpointError

BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

NAMES: tuple[str, ...] = tuple(BITS)
"""Position in this tuple is the code of a dtype in a manifest: append only, never reorder."""

CODES: dict[str, int] = {name: code for code, name in enumerate(NAMES)}


def nbytes(dtype: str, elements: int) -> int:
    """Bytes of `elements` packed values; CheckpointError unless they fill whole bytes."""
    bits = BITS[dtype] * elements
    if bits % 8:
        raise CheckpointError(f"{elements} elements of {dtype} do not fill whole bytes")
    return bits // 8
