"""What a user would load a checkpoint with instead, and the ceilings of it, in one process each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to load files to the GPU. `environ` is set before anything is imported for it."""

    name: str
    load: Callable[[Sequence[str]], Tensors]
    environ: Mapping[str, str] = field(default_factory=dict)


def load_file(paths: Sequence[str]) -> Tensors:
    """safetensors itself."""
    from safetensors.torch import load_file as load

    return {name: t for path in paths for name, t in load(path, device="cuda").items()}


def fastsafetensors(paths: Sequence[str]) -> Tensors:
    """As vLLM uses it where there is no GPUDirect Storage."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(list(paths), nogds=True, device="cuda:0") as files:
        return {name: files.get_tensor(name) for name in files.keys()}  # noqa: SIM118


def instanttensor(paths: Sequence[str]) -> Tensors:
    """As vLLM uses it."""
    from instanttensor import safe_open

    with safe_open(list(paths), framework="pt", device=0) as files:
        return dict(files.tensors())


def runai(paths: Sequence[str]) -> Tensors:
    """As vLLM uses it."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(paths), device="cuda:0")
        return dict(streamer.get_tensors())


LOAD_FILE = Way("safetensors load_file", load_file)
LIBRARIES = (
    Way("fastsafetensors", fastsafetensors),
    Way("fastsafetensors, page cache", fastsafetensors, {"FASTSAFETENSORS_ODIRECT": "0"}),
    Way("instanttensor", instanttensor),
    Way("instanttensor, page cache", instanttensor, {"INSTANTTENSOR_BACKEND": "BUFFERED"}),
    Way("runai-model-streamer", runai),
    Way(
        "runai-model-streamer, page cache",
        runai,
        {"RUNAI_STREAMER_FS_STRATEGY": "io_uring_buffered,sync_buffered"},
    ),
)
"""Each as it comes, which is past the page cache, and as it reads through it."""


class Loading:
    """Ready once it has a CUDA context."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()

    def load(self, load: Callable[[Sequence[str]], Tensors], paths: list[Path]) -> float:
        """GB/s from the call to tensors on the GPU; they are freed then."""
        texts = [str(path) for path in paths]
        started = time.perf_counter()
        tensors = load(texts)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        if not all(tensor.is_cuda for tensor in tensors.values()):
            raise ValueError("some tensors are not on the GPU")
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        del tensors
        torch.cuda.empty_cache()
        return nbytes / seconds / 1e9

    def pinned_rate(self, runs: int) -> list[float]:
        """GB/s of copies of 1 GiB from pinned memory."""
        source = torch.ones(1 << 30, dtype=torch.uint8).pin_memory()
        target = torch.empty_like(source, device="cuda")
        return [self._copy(source, target) for _ in range(runs + 1)][1:]

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return source.nbytes / (time.perf_counter() - started) / 1e9
