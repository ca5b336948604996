"""Device memory as the driver counts it, asked of NVML: this process never has a CUDA context."""

from __future__ import annotations

import os
import time

import pynvml

from preloadd.linux.owner import Owner

MIB = 1 << 20
SETTLE_S = 10.0
STILL_S = 0.5
NOTHING = 2 * MIB - 1
"""Bytes less than the smallest allocation there is: the driver's own use may differ by them."""


class Meter(Owner):
    """One GPU's memory. NVML stays open, so the device stays initialised throughout."""

    def __init__(self, gpu: str | int = 0) -> None:
        """`gpu` is a UUID, or its number in NVML's list. LookupError if there is no such GPU."""
        try:
            pynvml.nvmlInit()
            if isinstance(gpu, str):
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
            else:
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
            self.uuid: str = pynvml.nvmlDeviceGetUUID(self._handle)
        except pynvml.NVMLError as error:
            raise LookupError(f"no GPU {gpu} to measure on: {error}") from error

    def used(self) -> int:
        """Bytes in use, the driver's own included: only differences mean something."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def contexts(self) -> set[int]:
        """The other processes that have a CUDA context there, as far as NVML sees them."""
        told = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {process.pid for process in told} - {os.getpid()}

    def minor(self) -> int:
        """N of the node /dev/nvidiaN."""
        return int(pynvml.nvmlDeviceGetMinorNumber(self._handle))

    def settled(self) -> int:
        """Bytes in use once they have stayed the same for half a second.

        The driver frees what a process leaves behind some time after the process is gone.
        """
        deadline = time.monotonic() + SETTLE_S
        before, since = self.used(), time.monotonic()
        while time.monotonic() < min(deadline, since + STILL_S):
            time.sleep(0.02)
            now = self.used()
            if now != before:
                before, since = now, time.monotonic()
        return before

    def back_to(self, start: int) -> int:
        """Bytes in use once they are as good as `start` again, or are not after a while."""
        deadline = time.monotonic() + SETTLE_S
        while abs((used := self.used()) - start) > NOTHING and time.monotonic() < deadline:
            time.sleep(0.02)
        return used

    def facts(self) -> dict[str, object]:
        """What a reader of figures wants to know of the card."""
        return {
            "card": pynvml.nvmlDeviceGetName(self._handle),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "card_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total),
            "persistence": self._persistence(),
        }

    def close(self) -> None:
        """Let go of NVML."""
        pynvml.nvmlShutdown()

    def _persistence(self) -> bool | None:
        try:
            return bool(pynvml.nvmlDeviceGetPersistenceMode(self._handle))
        except pynvml.NVMLError:
            return None
