"""The GPUs as NVML tells of them: seen from outside, without a context of this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SLACK = (2 << 20) - 1
"""Bytes by which the driver's own use may differ: less than the smallest allocation there is."""

PATIENCE_S = 15.0
"""How long the driver may take to free what ended processes had."""


def missing() -> str:
    """Why there is no GPU to test with; empty if there is one. NVML stays open from then on."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        if not pynvml.nvmlDeviceGetCount():
            return "the driver knows none"
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    import torch

    return "" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"


def count() -> int:
    """How many GPUs there are."""
    import pynvml

    return pynvml.nvmlDeviceGetCount()


def uuid(index: int = 0) -> str:
    """The UUID with its prefix."""
    import pynvml

    return pynvml.nvmlDeviceGetUUID(_handle(index))


def minor(index: int = 0) -> int:
    """N of the node /dev/nvidiaN."""
    import pynvml

    return pynvml.nvmlDeviceGetMinorNumber(_handle(index))


def is_persistent(index: int = 0) -> bool:
    """Whether persistence mode is on."""
    import pynvml

    return bool(pynvml.nvmlDeviceGetPersistenceMode(_handle(index)))


def driver() -> str:
    """The driver's version."""
    import pynvml

    return pynvml.nvmlSystemGetDriverVersion()


def name(index: int = 0) -> str:
    """The card."""
    import pynvml

    return pynvml.nvmlDeviceGetName(_handle(index))


def used(index: int | None = None) -> int:
    """Bytes of device memory that are not free, on one GPU or on all."""
    import pynvml

    chosen = range(count()) if index is None else [index]
    return sum(pynvml.nvmlDeviceGetMemoryInfo(_handle(each)).used for each in chosen)


def free(index: int = 0) -> int:
    """Bytes of device memory that are."""
    import pynvml

    return pynvml.nvmlDeviceGetMemoryInfo(_handle(index)).free


def contexts(index: int = 0) -> set[int]:
    """The other processes that have a context."""
    import pynvml

    told = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(index))
    return {each.pid for each in told} - {os.getpid()}


def settles(seen: Callable[[], object]) -> bool:
    """Whether `seen` holds, at the latest after some patience."""
    deadline = time.monotonic() + PATIENCE_S
    while not seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def back_at(before: int, index: int | None = None) -> bool:
    """Whether as much memory is in use as `before`, at the latest after some patience."""
    return settles(lambda: abs(used(index) - before) <= SLACK)


def _handle(index: int):
    import pynvml

    return pynvml.nvmlDeviceGetHandleByIndex(index)
