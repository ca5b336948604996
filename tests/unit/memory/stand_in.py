"""What stands in for the driver of a GPU, and the devices that it has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from preloadd.domain.ids import DeviceId
from preloadd.memory.vmm import Driver

CUDA_DEVICES = tuple(DeviceId(f"GPU-{n}a1b2c3d-0000-4000-8000-0000000000da") for n in range(1, 4))
HIP_DEVICES = tuple(DeviceId(f"GPU-{n}a1b2c3d4e5f6071") for n in range(1, 4))
UNIT = 4096


@dataclass(frozen=True)
class StandIn:
    """A driver that stands in: how to open a device, and how to tell it what to play."""

    library: ctypes.CDLL
    path: Path
    prefix: str
    devices: tuple[DeviceId, ...]
    open_ordinal: Callable[[int], Driver]
    setenv: Callable[[str, str], None]

    def alive(self) -> int:
        """Handles, mappings, queues, contexts … that this process has."""
        return int(self.library.stand_in_alive())

    def fail(self, function: str, code: int, nth: int = 0) -> None:
        """Have a function fail, at every call or at the nth; `function` without its prefix."""
        self.setenv("STAND_IN_FAIL", f"{self.prefix}{function}:{code}:{nth}" if code else "")

    def fail_pinning(self, nth: int = 0) -> None:
        """Have no host memory pinned, or not the nth time."""
        rules = [f"hipHostRegister:2:{nth}", f"cuMemHostAlloc:2:{nth}", "cuMemHostRegister:2"]
        self.setenv("STAND_IN_FAIL", ",".join(rules))

    def end(self) -> None:
        """Forget all that is left, as the end of a process would."""
        self.fail("", 0)
        self.library.stand_in_end()
