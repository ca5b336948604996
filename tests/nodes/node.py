"""`preloadd run` on hosts, as an operator starts it on each of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from preloadd.domain.ids import Instance
from preloadd.domain.placement import Placement
from preloadd.errors import PreloadError
from preloadd.linux.owner import Owner
from preloadd.protocol.messages import StatusTold
from preloadd.transport.status import ask_status
from tests.checkout import ROOT
from tests.nodes.hosts import PATIENCE_S, Host
from tests.nodes.shards import Tensors, shard

INSIDE = Path(__file__).with_name("inside")
PORT = 29600
LIMITS = {"rendezvous": 20.0}
"""Deadlines of ranks, in seconds, by the names of flags; others are as usual."""

STOP_S = "2"
"""What ranks have for ending, of which there is no flag."""

_OURS = ("PRELOADD_", "VLLM_", "HF_", "TESTS_")


class Node(Owner):
    """One group's launcher on a host, with its ranks; ends with this at the latest."""

    def __init__(
        self,
        host: Host,
        model: Path,
        *flags: str,
        version: str = "",
        limits: Mapping[str, float] = {},
        environ: Mapping[str, str] = {},
        patience: float = PATIENCE_S,
    ) -> None:
        self.host = host
        self.model = model
        self._patience = patience
        self._told = host.folder / "told"
        self._told.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "preloadd", "run", str(model), "--memory", "host", *flags]
        argv += ["--weight-cache-socket-dir", str(host.sockets)]
        for name, seconds in {**LIMITS, **limits}.items():
            argv += [f"--{name.replace('_', '-')}-timeout", f"{seconds:g}"]
        told = {"TESTS_STOP_S": STOP_S, "TESTS_VERSION": version}
        self._process = host.start(argv, self._told, _environ(**told, **environ))

    # -- what is seen of it --

    @property
    def told(self) -> str:
        """All that it and its ranks said."""
        return self._told.read_text(errors="replace")

    @property
    def why(self) -> str:
        """The one error by which its rank ended, on one line: that of its log, where its launcher
        could not tell the whole."""
        assert "Traceback" not in self.told, self.told
        lines = self.told.splitlines()
        errors = [line for line in lines if "ERROR" in line]
        (line,) = errors or [line for line in lines if line.startswith("stopping: ")]
        return line

    def status(self, instance: str = "CPU-0") -> StatusTold:
        """What a rank tells of itself."""
        return ask_status(self._socket(instance), timeout=5.0)

    @property
    def serves(self) -> bool:
        """Whether its rank has weights."""
        try:
            return self.status().state == "serving"
        except PreloadError:
            return False

    def serving(self) -> None:
        """Wait until it serves."""
        self.until(lambda: "ready" in self.told and self.serves, "weights")

    def waits_for(self, who: str) -> None:
        """Wait until its rank says for whom it waits."""
        self.until(lambda: f"waiting for {who}\n" in self.told, f"waiting for {who}")

    def until(self, seen: Callable[[], object], what: str) -> None:
        """Wait until `seen` holds; fails at once if it ends before."""
        deadline = time.monotonic() + self._patience
        while not seen():
            ended = self._process.poll()
            assert ended is None, f"it ended with {ended} before {what}:\n{self.told}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.told}"
            time.sleep(0.01)

    def attach(
        self,
        placement: Placement,
        instance: str = "CPU-0",
        *,
        model: Path | None = None,
        key: Mapping[str, str] | None = None,
    ) -> Tensors:
        """What an engine on its host finds mapped: its part of the model as it is stored, or of
        another `model`; with a `key`, whatever has that."""
        out, log = self.host.folder / "out", self.host.folder / "engine"
        asked = {"instance": instance, "model": str(model or self.model), "key": key}
        asked["placement"] = msgspec.to_builtins(placement)
        argv = [sys.executable, "-m", "tests.nodes.inside.engine"]
        argv += [msgspec.json.encode(asked).decode(), str(self.host.sockets), str(out)]
        with self.host.start(argv, log, _environ()) as process:
            assert process.wait(PATIENCE_S) == 0, log.read_text()
        found = shard(out)
        out.unlink()
        return found

    # -- what is done to it --

    def signal_rank(self, number: int, instance: str = "CPU-0") -> None:
        """Send a signal to one of its ranks alone."""
        ranks = set(self.host.running("preloadd.rank"))
        (pid,) = ranks.intersection(self.host.running(instance))
        os.kill(pid, number)

    def signal_loader(self, number: int) -> None:
        """Send a signal to the loader of its rank."""
        (pid,) = self.host.running("preloadd.loader")
        os.kill(pid, number)

    def stop(self) -> int:
        """End it as an operator does; its exit status."""
        for pid in self.host.running("preloadd.launcher"):
            os.kill(pid, signal.SIGTERM)
        return self.ended()

    def ended(self, within: float = PATIENCE_S) -> int:
        """Its exit status, as a shell has it, once it has ended."""
        try:
            status = self._process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {within:g} s:\n{self.told}") from None
        return status if status >= 0 else 128 - status

    def close(self) -> None:
        """End it by force, if it has not ended."""
        if self._process.poll() is None:
            for pid in self.host.processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def _socket(self, instance: str) -> Path:
        return self.host.sockets / instance / Instance.parse(instance).socket_name


def _environ(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**inherited, "PYTHONPATH": f"{INSIDE}:{ROOT}", **more}
