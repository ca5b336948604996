"""A foreground group for benchmarks: started, asked, ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from preloadd.errors import PreloadError
from preloadd.protocol.messages import StatusTold
from preloadd.transport.status import ask_status

PATIENCE_S = 120.0


class Daemon:
    """`preloadd run --restart-ranks` on one model, as long as the block lasts; in host memory
    unless `flags` say otherwise."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.sockets = folder / "sockets"
        self._argv = [sys.executable, "-m", "preloadd", "run", "--restart-ranks"]
        self._argv += ["--memory", "host", *flags]
        self._argv += ["--log-level", "warning", "--model", os.fspath(model)]
        self._argv += ["--weight-cache-socket-dir", os.fspath(self.sockets)]
        self._process: subprocess.Popen[bytes] | None = None

    def status(self, instance: str = "CPU-0") -> StatusTold:
        """What the rank tells of itself."""
        return ask_status(self.sockets / instance / "rank.sock", timeout=5.0)

    def wait_serving(self, *, other_than: int = 0) -> StatusTold:
        """The status of the rank once it serves from another process than `other_than`."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(PreloadError):
                told = self.status()
                if told.state == "serving" and told.pid != other_than:
                    return told
            time.sleep(0.01)
        raise TimeoutError("the daemon does not serve")

    @staticmethod
    def age_s(pid: int) -> float:
        """Seconds since the process was started, its interpreter's start included."""
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - started / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL)
        self.wait_serving()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(PATIENCE_S)
