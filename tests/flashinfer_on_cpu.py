"""FlashInfer's own tuner, tables and entry points, where there is no GPU: for processes that do
nothing else, since what is replaced stays so.

Replaced are what measures time, what asks the GPU, and the kernels themselves, which FlashInfer
would compile. Names that are not public were read in 0.7.2.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from flashinfer import utils
from flashinfer.autotuner import AutoTuner
from flashinfer.autotuner import autotuner as internals
from flashinfer.gemm import gemm_base

from preloadd.loader import warming
from preloadd.loader.autotune import gemms
from tests.tuned import H200

ALGORITHMS = 3
BEST = 1
"""The algorithm that is the fastest, whatever it is asked for."""


class Profiled:
    """What the tuner has measured, and what becomes of it: `oom` runs out of memory from so many
    rows on."""

    count = 0
    oom = 1 << 30


def act_as_h200() -> None:
    """Have this process's FlashInfer and loader take the CPU for an H200."""
    internals._collect_metadata = lambda: dict(H200)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.empty_cache = lambda: None
    torch.cuda.current_blas_handle = lambda: 0
    torch.cuda.device = lambda _: contextlib.nullcontext()
    AutoTuner._profile_single_kernel = _profile
    AutoTuner._prepare_input_tensors_with_batches = lambda _, inputs, __: [inputs]
    utils.get_compute_capability = lambda _: (9, 0)
    gemm_base.get_compute_capability = utils.get_compute_capability
    gemm_base.is_sm100f_supported = lambda _: False
    gemm_base.gen_gemm_module = lambda: SimpleNamespace(build_and_load=_Fp8)
    gemm_base.gen_mm_bf16_cublaslt_module = lambda: SimpleNamespace(build_and_load=_Bf16)
    gemm_base.get_tinygemm2_module = _Tiny
    gemms.why_not = lambda _: ""
    gemms.free = lambda _: 1 << 20
    warming.DEVICE = "cpu"


def _profile(_: AutoTuner, runner, inputs, tactic, *args, **more) -> float:
    Profiled.count += 1
    if inputs[0].shape[-2] >= Profiled.oom:
        raise torch.cuda.OutOfMemoryError("as much as there is")
    runner(inputs, tactic=tactic)
    return 1.0 if tactic == BEST else 2.0 + tactic


class _Kernels(SimpleNamespace):
    """A compiled module: what is not defined does nothing."""

    def __getattr__(self, _: str):
        return lambda *__: None


class _Fp8(_Kernels):
    def bmm_fp8_get_algos(self, *_) -> int:
        return ALGORITHMS


class _Bf16(_Kernels):
    def mm_bf16_cublaslt_get_algos(self, *_) -> int:
        return ALGORITHMS


class _Tiny(_Kernels):
    pass
