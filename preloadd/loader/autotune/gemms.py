"""FlashInfer itself: its kernels called as engines call them, its tuner asked what it knows.

Everything in here may raise anything: FlashInfer compiles kernels when they are first called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preloadd.loader.autotune.problems import Kernel, Problem

LEAST_CAPABILITY = (9, 0)
"""The oldest GPUs that the tuner is for, as vLLM has it."""


def why_not(device: str) -> str:
    """Why there is nothing to tune on a torch device of this name; '' if there is."""
    import torch

    if not torch.cuda.is_available():
        return "the loader's torch sees no GPU: see `preloadctl doctor`"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, found = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
        return f"FlashInfer tunes from compute capability {least} on, and this GPU has {found}"
    return ""


def free(device: str) -> int:
    """Bytes that are free on the device."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


class Gemms:
    """Matrix products on one device, whose inputs are made there and given up after each call."""

    def __init__(self, device: str) -> None:
        self._device = device

    def run(self, problem: Problem, rows: int) -> None:
        """One product of a batch with so many rows. While tuning, all sizes up to it are tuned."""
        import torch

        with torch.inference_mode():
            match problem.kernel:
                case Kernel.FP8_CUBLAS:
                    self._fp8(problem, rows)
                case Kernel.BF16_CUBLASLT:
                    self._bf16(problem, rows, "cublaslt")
                case Kernel.BF16_TINYGEMM:
                    self._bf16(problem, rows, "tinygemm")

    def give_up(self) -> None:
        """Give memory back that torch keeps for later."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _fp8(self, problem: Problem, rows: int) -> None:
        import flashinfer
        import torch

        batch = self._random_fp8(rows, problem.inputs).unsqueeze(0)
        weight = self._random_fp8(problem.outputs, problem.inputs).unsqueeze(0)
        scale = torch.ones((), dtype=torch.float32, device=self._device)
        flashinfer.bmm_fp8(
            batch,
            weight.transpose(-2, -1),
            scale,
            scale,
            getattr(torch, problem.dtype),
            backend="cublas",
        )

    def _bf16(self, problem: Problem, rows: int, backend: str) -> None:
        import flashinfer
        import torch

        dtype = getattr(torch, problem.dtype)
        batch = torch.randn(rows, problem.inputs, dtype=dtype, device=self._device)
        weight = torch.randn(problem.outputs, problem.inputs, dtype=dtype, device=self._device)
        flashinfer.mm_bf16(batch, weight.transpose(-2, -1), out_dtype=dtype, backend=backend)

    def _random_fp8(self, rows: int, columns: int) -> Any:  # noqa: ANN401 - a tensor
        """Numbers from 0 up, none of them infinite or none at all: e4m3 has those from 0x7f on."""
        import torch

        codes = torch.empty(rows, columns, dtype=torch.uint8, device=self._device)
        return codes.random_(0, 0x70).view(torch.float8_e4m3fn)


@dataclass(slots=True)
class Counted:
    """How often FlashInfer found an answer, and how often it had none."""

    hits: int = 0
    misses: int = 0


@contextmanager
def tuning(table: Path) -> Iterator[None]:
    """What is called in the block is tuned, and `table` written at its end if any of it was."""
    from flashinfer.autotuner import autotune

    with autotune(tune_mode=True, cache=str(table)):
        yield


@contextmanager
def replaying(table: Path) -> Iterator[Counted]:
    """What is called in the block is looked up in `table` alone, as engines do, and counted."""
    from flashinfer.autotuner import AutoTuner, autotune

    tuner: Any = AutoTuner.get()
    tuner.clear_cache()
    counted, search = Counted(), tuner.search_cache

    def counting(*args: Any, **more: Any) -> Any:  # noqa: ANN401 - passed through
        found = search(*args, **more)
        if found[0]:
            counted.hits += 1
        else:
            counted.misses += 1
        return found

    tuner.search_cache = counting
    try:
        with autotune(tune_mode=False, cache=str(table)):
            yield counted
    finally:
        del tuner.search_cache
        tuner.clear_cache()
