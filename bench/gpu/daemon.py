"""A rank on the GPU under `preloadd run --restart-ranks`, which is also its fd store."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench import daemon
from preloadd.errors import PreloadError
from preloadd.protocol.messages import StatusTold

PATIENCE_S = 90.0
END_S = 20.0
HANG_UP_S = 0.2
"""Until a rank has closed a connection that its peer has closed."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """How a rank came back: when its process was killed, when the next served, both on the
    monotonic clock; and the seconds that the next needed from its start."""

    killed: float
    served: float
    seconds: float
    bytes_read: int


class Daemon(daemon.Daemon):
    """As long as the block lasts. `instance` is the GPU's UUID, or CPU-0."""

    def __init__(self, model: Path, folder: Path, instance: str, *flags: str) -> None:
        super().__init__(model, folder, *flags)
        self._instance = instance

    def status(self, instance: str = "") -> StatusTold:
        """What the rank tells of itself."""
        return super().status(instance or self._instance)

    def wait_serving(self, *, other_than: int = 0) -> StatusTold:
        """As of the parent, but ChildProcessError at once if the group ends."""
        deadline = time.monotonic() + PATIENCE_S
        assert self._process is not None
        while time.monotonic() < deadline:
            with contextlib.suppress(PreloadError):
                told = self.status()
                if told.state == "serving" and told.pid != other_than:
                    return told
            if self._process.poll() is not None:
                raise ChildProcessError(f"preloadd run ended with {self._process.returncode}")
            time.sleep(0.005)
        raise TimeoutError("the daemon does not serve")

    def kill_rank(self) -> Adopted:
        """SIGKILL for the rank, and wait until it serves again."""
        old = self.status().pid
        killed = time.monotonic()
        os.kill(old, signal.SIGKILL)
        told = self.wait_serving(other_than=old)
        served = time.monotonic()
        if not told.adopted:
            raise ChildProcessError("the rank loaded anew instead of adopting")
        seconds = told.ready_s + self.age_s(told.pid) - told.uptime_s
        return Adopted(killed, served, seconds, told.counters.get("bytes_read", -1))

    def descriptors(self) -> int:
        """How many the rank has open, while nobody asks it anything."""
        folder = f"/proc/{self.status().pid}/fd"
        time.sleep(HANG_UP_S)
        return len(os.listdir(folder))  # noqa: PTH208 - names suffice

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
