"""Which of FlashInfer's matrix products the linear layers of a shard come down to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from preloadd.domain.dtypes import NAMES
from preloadd.domain.manifest import Tensors
from preloadd.weights.plan.names import locate

MOST_ROWS = 8192
"""Rows of a batch. FlashInfer tunes for all sizes up to it that it has buckets for: powers of two
up to 256, steps of 256 up to 2,048, of 512 up to 4,096, then this (source: its
`get_hybrid_num_tokens_buckets`, which vLLM takes too)."""

FEW_ROWS = 64
"""The same for a kernel that is made for small batches."""

_WEIGHT = ".weight"
_SCALES = ("weight_scale", "weight_scale_inv")
_OUTPUTS = ("bfloat16", "float16")


class Kernel(StrEnum):
    """A function of FlashInfer and the one backend it is called with.

    Never "auto": that takes part in tuning whatever is installed, and fails where one part is not.
    """

    FP8_CUBLAS = "bmm_fp8 by cublas"
    BF16_CUBLASLT = "mm_bf16 by cublaslt"
    BF16_TINYGEMM = "mm_bf16 by tinygemm"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """Products of a matrix of `outputs` x `inputs` with batches of up to `rows`; what comes out is
    of `dtype`, as torch names it."""

    kernel: Kernel
    outputs: int
    inputs: int
    dtype: str
    rows: int = MOST_ROWS

    @property
    def batches(self) -> Iterator[int]:
        """Numbers of rows for which a table has to have an answer of its own."""
        rows = 1
        while rows <= self.rows:
            yield rows
            rows *= 2

    def __str__(self) -> str:
        return f"{self.kernel}, {self.outputs} x {self.inputs}"


def problems(tensors: Tensors, dtype: str) -> tuple[Problem, ...]:
    """Those of a shard's weights, each once, in order; `dtype` is that of the model.

    Weights of layers alone: embedding and head are no products of whole batches, and experts are
    multiplied by kernels of their own.
    """
    shapes = dict(zip(tensors.name, tensors.shape, strict=True))
    found: set[Problem] = set()
    for name, code, shape in zip(tensors.name, tensors.dtype, tensors.shape, strict=True):
        if _is_linear(name) and len(shape) == 2:
            found.update(_of_weight(NAMES[code], *shape, dtype, _scales(name, shapes)))
    return tuple(sorted(found))


def _is_linear(name: str) -> bool:
    spot = locate(name)
    return spot.layer is not None and not spot.of_experts and name.endswith(_WEIGHT)


def _scales(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many numbers scale a weight; 1 where none are stored."""
    stem = name.removesuffix(_WEIGHT)
    for suffix in _SCALES:
        shape = shapes.get(f"{stem}.{suffix}")
        if shape is not None:
            count = 1
            for size in shape:
                count *= size
            return count
    return 1


def _of_weight(
    stored: str, outputs: int, inputs: int, dtype: str, scales: int
) -> Iterator[Problem]:
    """What FlashInfer has for a weight; nothing where it has nothing that is tuned."""
    if stored == "F8_E4M3" and scales == 1 and outputs % 16 == inputs % 16 == 0:
        # One scale for all of it: with one for each row or block it takes other kernels.
        result = dtype if dtype in _OUTPUTS else _OUTPUTS[0]
        yield Problem(Kernel.FP8_CUBLAS, outputs, inputs, result)
    if stored == "BF16" and outputs % 8 == inputs % 8 == 0:
        yield Problem(Kernel.BF16_CUBLASLT, outputs, inputs, "bfloat16")
        if outputs % 16 == 0 and inputs % 256 == 0:
            yield Problem(Kernel.BF16_TINYGEMM, outputs, inputs, "bfloat16", FEW_ROWS)
