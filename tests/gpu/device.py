"""The GPUs of this host as NVML tells of them: from outside, without a context of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import pynvml

from bench.gpu.meter import NOTHING, Meter

PATIENCE_S = 15.0
"""How long the driver may take to free what ended processes had."""


def missing() -> str:
    """Why there is no GPU to test with; empty if there is one. NVML stays open from then on."""
    try:
        pynvml.nvmlInit()
        if not count():
            return "the driver knows none"
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    import torch

    return "" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"


def count() -> int:
    """How many GPUs there are."""
    return pynvml.nvmlDeviceGetCount()


@cache
def meter(index: int = 0) -> Meter:
    """One of them."""
    return Meter(index)


def used() -> int:
    """Bytes of device memory that are not free, on all of them."""
    return sum(meter(index).used() for index in range(count()))


def settles(seen: Callable[[], object]) -> bool:
    """Whether `seen` holds, at the latest after some patience."""
    deadline = time.monotonic() + PATIENCE_S
    while not seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def back_at(before: int) -> bool:
    """Whether as much memory is in use as `before`, at the latest after some patience."""
    return settles(lambda: abs(used() - before) <= NOTHING)
