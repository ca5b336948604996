"""Foreground groups for benchmarks and tests: started, asked, killed, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from preloadd.domain.ids import Instance
from preloadd.errors import PreloadError
from preloadd.linux.owner import Owner
from preloadd.protocol.messages import StatusTold
from preloadd.transport.status import ask_status

PATIENCE_S = 90.0
END_S = 60.0
HANG_UP_S = 0.2
"""Until a rank has closed a connection that its peer has closed."""


class Group(Owner):
    """`preloadd run` on one model, as its users start it, until closed. `sockets` is the folder of
    its ranks; what it and they say is kept in a file of `folder`. It may take `patience` seconds to
    serve."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        patience: float = PATIENCE_S,
    ) -> None:
        self.sockets = folder / "sockets"
        self._patience = patience
        self._told = folder / "told"
        argv = [sys.executable, "-m", "preloadd", "run", "--model", os.fspath(model)]
        argv += ["--weight-cache-socket-dir", os.fspath(self.sockets), *flags]
        with self._told.open("wb") as told:
            self.process = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=told, stderr=told
            )

    @property
    def told(self) -> str:
        """All that it and its ranks said."""
        return self._told.read_text(errors="replace")

    def status(self, instance: str) -> StatusTold:
        """What a rank tells of itself."""
        name = Instance.parse(instance).socket_name
        return ask_status(self.sockets / instance / name, timeout=5.0)

    def serving(self, *instances: str, other_than: int = 0) -> list[StatusTold]:
        """What its ranks tell, once all of them serve, from other processes than `other_than`.

        ChildProcessError at once if the group ends, TimeoutError if it takes too long.
        """

        def serves(told: StatusTold) -> bool:
            return told.state == "serving" and told.pid != other_than

        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            with suppress(PreloadError):
                told = [self.status(instance) for instance in instances]
                if all(map(serves, told)):
                    return told
            if self.process.poll() is not None:
                raise ChildProcessError(f"it ended with {self.process.returncode}:\n{self.told}")
            time.sleep(0.005)
        raise TimeoutError(f"it does not serve:\n{self.told}")

    def ended(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(END_S)

    def close(self) -> None:
        """Have it end, by force if it does not."""
        self.process.terminate()
        try:
            self.ended()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@dataclass(frozen=True, slots=True)
class Adopted:
    """How a rank came back: when its process was killed, when the next served, both on the
    monotonic clock; and the seconds that the next needed from its start."""

    killed: float
    served: float
    seconds: float
    bytes_read: int


class Daemon(Group):
    """One rank of a group that restarts its ranks, and so is their fd store. `instance` is the
    GPU's UUID, or CPU-0. In a block it serves from the start."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        instance: str,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        patience: float = PATIENCE_S,
    ) -> None:
        quiet = ("--restart-ranks", "--log-level", "warning")
        super().__init__(model, folder, *quiet, *flags, environ=environ, patience=patience)
        self.instance = instance

    def __enter__(self) -> Self:
        try:
            self.serving(self.instance)
        except BaseException:
            self.close()
            raise
        return self

    def status(self, instance: str = "") -> StatusTold:
        """What its rank tells of itself, or another one of the group."""
        return super().status(instance or self.instance)

    def kill_rank(self) -> Adopted:
        """SIGKILL for the rank, and wait until it serves again."""
        old = self.status().pid
        killed = time.monotonic()
        os.kill(old, signal.SIGKILL)
        (told,) = self.serving(self.instance, other_than=old)
        served = time.monotonic()
        if not told.adopted:
            raise ChildProcessError("the rank loaded anew instead of adopting")
        return Adopted(killed, served, start_s(told), told.counters["bytes_read"])

    def descriptors(self) -> tuple[int, int]:
        """How many the rank and its launcher have open, while nobody asks them anything."""
        rank, launcher = self.status().pid, self.process.pid
        time.sleep(HANG_UP_S)
        return open_files(rank), open_files(launcher)


def open_files(pid: int) -> int:
    """How many descriptors a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - names suffice


def start_s(told: StatusTold) -> float:
    """Seconds from the start of a rank's process until it served, its interpreter's included."""
    started = int(Path(f"/proc/{told.pid}/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return told.ready_s + uptime - started / os.sysconf("SC_CLK_TCK") - told.uptime_s
