"""What engines leave behind: many at once, and many killed while they are attached.

Claims: 50 engines attach at the same time and all see every tensor; after they ended, and after 200
engines were killed with SIGKILL while attached, device memory, the descriptors of the rank and of
its launcher, and the leases are what they were before. Compared with nothing: there is no other
number than zero.

Every engine is a process with torch and a CUDA context that calls `attach_checkpoint`, as users
have it. The checkpoint is sparse (see `checkpoints`) and small, because 50 contexts take about
30 GiB. Takes about 50 s on an H200.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.daemon import Daemon
from bench.gpu.checkpoints import GIB, sparse
from bench.gpu.engine import Engine
from bench.gpu.meter import NOTHING
from bench.gpu.session import Session, run

TENSORS = 1000
BACK_S = 10.0
TOLD_EVERY = 50


def main() -> int:
    """Measure."""

    def also(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gib", type=float, default=8, help="size of the weights")
        parser.add_argument("--engines", type=int, default=50, help="that attach at once")
        parser.add_argument("--kills", type=int, default=200, help="engines killed in all")
        parser.add_argument("--beside", type=int, default=12, help="killed side by side")

    return run("leaks", __doc__.partition("\n")[0], _measure, limit_s=150, also=also)


def _measure(session: Session) -> None:
    start = session.meter.settled() if session.meter else 0
    with session.holes() as folder:
        model = sparse(folder / "model", TENSORS, int(session.arguments.gib * GIB))
        with session.daemon(model) as daemon:
            leaks = _Leaks(session, model, daemon)
            session.part("at once", leaks.at_once)
            session.part("killed", leaks.killed)
    if session.meter:
        left = session.meter.back_to(start) - start
        session.report.nothing("end", "device memory left behind", left)


@dataclass(frozen=True, slots=True)
class State:
    """What must be as before: bytes of device memory, descriptors of the rank and of its launcher,
    the rank's leases."""

    memory: int
    descriptors: tuple[int, int]
    leases: int

    def same_as(self, other: State) -> bool:
        """But for what the driver's own use of memory differs by."""
        return (
            abs(self.memory - other.memory) <= NOTHING
            and self.descriptors == other.descriptors
            and self.leases == other.leases
        )


class _Leaks:
    """One daemon, and what is done to it. The first engine of all does not count."""

    def __init__(self, session: Session, model: Path, daemon: Daemon) -> None:
        self._session, self._model, self._daemon = session, model, daemon
        with session.engine(model, daemon) as engine:
            engine.ready()
            engine.ask(Engine.attach)
        time.sleep(1.0)
        if session.meter:
            session.meter.settled()
        self._before = self._state()

    def at_once(self, part: str) -> None:
        """All are ready, then all are told to attach."""
        report, count = self._session.report, self._session.arguments.engines
        with ExitStack() as undo:
            engines = [
                undo.enter_context(self._session.engine(self._model, self._daemon))
                for _ in range(count)
            ]
            for engine in engines:
                engine.ready()
            for engine in engines:
                engine.ask(Engine.open)
            started = time.monotonic()
            for engine in engines:
                engine.tell(Engine.attach)
            took = [engine.result() for engine in engines]
            seconds = time.monotonic() - started
            leases = self._daemon.status().lease_count
            right = [engine.ask(Engine.heads) for engine in engines]
        report.figure(part, f"until all {count} were attached", 1000 * seconds, "ms")
        report.figure(part, "one of them", took, "ms")
        report.figure(part, "the slowest", max(took), "ms")
        report.figure(part, "leases then", leases, at_least=count)
        report.holds(part, "all see every tensor", right == [TENSORS] * count)
        self._compare(part)

    def killed(self, part: str) -> None:
        """SIGKILL while attached, again and again, several side by side."""
        report, arguments = self._session.report, self._session.arguments
        beside = min(arguments.beside, 2 * (os.cpu_count() or 1))
        with ThreadPoolExecutor(beside) as pool:
            took = [ms for ms in pool.map(self._attach_and_die, range(arguments.kills)) if ms]
        report.figure(part, "engines killed while attached", len(took), at_least=arguments.kills)
        if took:
            report.figure(part, f"attaching, {beside} side by side", statistics.median(took), "ms")
        self._compare(part)

    def _attach_and_die(self, number: int) -> float:
        """Milliseconds it took to attach; 0 if the time is over."""
        if time.monotonic() > self._session.deadline:
            return 0.0
        with self._session.engine(self._model, self._daemon) as engine:
            engine.ready()
            took = engine.ask(Engine.attach)
            engine.kill()
        if number % TOLD_EVERY == TOLD_EVERY - 1:
            self._session.report.tell(f"{number + 1} killed")
        return float(took)

    def _compare(self, part: str) -> None:
        after = self._settled()
        figure = self._session.report.figure
        if self._session.meter:
            more = after.memory - self._before.memory
            self._session.report.nothing(part, "device memory more than before", more)
        counts = zip(("rank", "launcher"), after.descriptors, self._before.descriptors, strict=True)
        for whose, now, before in counts:
            figure(part, f"descriptors of the {whose} more than before", now - before, at_most=0)
        figure(part, "leases left", after.leases - self._before.leases, at_most=0)

    def _settled(self) -> State:
        """The state once it is as before, or still is not after a while."""
        deadline = time.monotonic() + BACK_S
        while not (state := self._state()).same_as(self._before):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return state

    def _state(self) -> State:
        meter = self._session.meter
        told = self._daemon.status()
        memory = meter.used() if meter else 0
        return State(memory, self._daemon.descriptors(), told.lease_count)


if __name__ == "__main__":
    sys.exit(main())
