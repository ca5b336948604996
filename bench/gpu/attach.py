"""Attaching: tensors by the thousand, from connecting to usable, against per-tensor CUDA IPC.

Claims: attaching costs milliseconds, ten times less than handles tensor by tensor; it does not grow
with the size of the weights; and neither a rank nor an engine that attaches takes device memory.

The whole chain is real: `preloadd run`, its loader, its rank, and engine processes that call
`attach_checkpoint`. Checkpoints are sparse files (see `checkpoints`), because nothing here depends
on what the bytes are; the first 4 KiB of every tensor are data, and compared in every engine. Each
sample of "first" is another process, started as programs are, that has torch and a CUDA context and
never attached before; "again" is the median of its further attachments. The two ways take turns:
per size, one after the other, the memory of the first being free again before the second starts.

Takes about 170 s on an H200. `--sizes TENSORS:GIB[,…]` measures others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from bench.daemon import Daemon
from bench.gpu import ipc
from bench.gpu.checkpoints import GIB, sparse
from bench.gpu.child import Actor
from bench.gpu.engine import Engine
from bench.gpu.meter import MIB, Meter
from bench.gpu.report import Report
from bench.gpu.session import Session, run

SIZES = "1000:32,4000:32,1000:1,1000:96"
AGAIN = 9
GROWTH_MS = 12.0
ARENA = 1.01


@dataclass(frozen=True, slots=True)
class Promise:
    """What was promised for a size."""

    ratio: float
    attach_ms: float


PROMISES = {(1000, 32.0): Promise(10, 15), (4000, 32.0): Promise(8, 50)}
FIRST = "first in a process"
NAMES = {ipc.NOW: "CUDA IPC", ipc.READY: "CUDA IPC, pickled before"}


@dataclass(slots=True)
class Times:
    """Milliseconds in one process each."""

    first: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)


def main() -> int:
    """Measure every size."""

    def sizes(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--sizes", default=SIZES, metavar="TENSORS:GIB,…", help=SIZES)

    return run("attach", __doc__.partition("\n")[0], _measure, limit_s=300, also=sizes)


def _measure(session: Session) -> None:
    firsts: dict[tuple[int, float], float] = {}
    for text in session.arguments.sizes.split(","):
        tensors, gib = int(text.partition(":")[0]), float(text.partition(":")[2])

        def one(part: str, tensors: int = tensors, gib: float = gib) -> None:
            firsts[tensors, gib] = _Size(session, part, tensors, gib).measure()

        session.part(f"{tensors:,} tensors, {gib:g} GiB", one)
    small, large = firsts.get((1000, 1.0)), firsts.get((1000, 96.0))
    if small is not None and large is not None:
        what = "attach(96 GiB) - attach(1 GiB), 1,000 tensors"
        session.report.figure("growth", what, large - small, "ms", at_most=GROWTH_MS)


class _Size:
    """One size, both ways."""

    def __init__(self, session: Session, part: str, tensors: int, gib: float) -> None:
        self._session, self._part = session, part
        self._tensors, self._nbytes = tensors, int(gib * GIB)
        self._promise = PROMISES.get((tensors, gib)) if session.meter else None

    def measure(self) -> float:
        """Milliseconds of the first attachment in a process."""
        report, part, promise = self._session.report, self._part, self._promise
        ours = self._ours()
        limit = promise.attach_ms if promise else None
        first = report.figure(part, f"preloadd, {FIRST}", ours.first, "ms", at_most=limit)
        again = report.figure(part, "preloadd, again", ours.again, "ms")
        if self._session.meter is None:
            report.absent(part, "CUDA IPC", "needs a GPU")
            return first
        for how, theirs in self._theirs(self._session.meter).items():
            name = NAMES[how]
            their_first = report.figure(part, f"{name}, {FIRST}", theirs.first, "ms")
            their_again = report.figure(part, f"{name}, again", theirs.again, "ms")
            # The promise is of what vLLM and SGLang do, which is to reduce when asked.
            least = promise.ratio if promise and how == ipc.NOW else None
            ratio = their_first / first
            report.figure(part, f"{name} / preloadd, {FIRST}", ratio, "x", at_least=least)
            report.figure(part, f"{name} / preloadd, again", their_again / again, "x")
        return first

    def _ours(self) -> Times:
        session = self._session
        start = session.meter.settled() if session.meter else 0
        with session.holes() as folder:
            model = sparse(folder / "model", self._tensors, self._nbytes)
            with session.daemon(model) as daemon:
                if session.meter:
                    _tell_rank(session.report, self._part, session.meter.settled() - start, daemon)
                times = self._attach(model, daemon)
        if session.meter:
            left = session.meter.back_to(start) - start
            session.report.nothing(self._part, "device memory left behind", left)
        return times

    def _attach(self, model: Path, daemon: Daemon) -> Times:
        session, report, times = self._session, self._session.report, Times()
        with ExitStack() as undo:
            engines = [
                undo.enter_context(session.engine(model, daemon, forked=False))
                for _ in range(session.runs)
            ]
            for engine in engines:
                engine.ready()
            opened = [engine.ask(Engine.open) for engine in engines]
            grown = [_grown(engine, times, session.meter) for engine in engines]
            closed: list[float] = []
            for engine in engines:
                pairs = engine.ask(Engine.repeat, AGAIN)
                times.again.append(statistics.median(attach for attach, _ in pairs))
                closed.append(statistics.median(close for _, close in pairs))
            right = [_right(engine) for engine in engines]
        report.figure(self._part, "preloadd, bindings and device, once a process", opened, "ms")
        report.figure(self._part, "preloadd, closing", closed, "ms")
        wanted = [self._tensors] * session.runs
        report.holds(self._part, "every tensor begins with its own bytes", right == wanted)
        if session.meter:
            report.nothing(self._part, "device memory of an attached engine", max(grown))
        return times

    def _theirs(self, meter: Meter) -> dict[bytes, Times]:
        """By the way it is done."""
        session, report = self._session, self._session.report
        path = str(session.scratch / f"ipc-{self._tensors}-{self._nbytes}.sock")
        found = {how: Times() for how in NAMES}
        with ExitStack() as undo:
            server = undo.enter_context(Actor(ipc.Server, path, forked=False)).ready()
            clients = {
                how: [
                    undo.enter_context(Actor(ipc.Client, path, forked=False))
                    for _ in range(session.runs)
                ]
                for how in NAMES
            }
            for client in chain.from_iterable(clients.values()):
                client.ready()
            start = meter.settled()
            nbytes = server.ask(ipc.Server.fill, self._tensors, self._nbytes)
            more = (meter.settled() - start - nbytes) / MIB
            report.figure(self._part, "CUDA IPC: server's memory beyond tensors", more, "MiB")
            grown = [
                _fetch(client, how, found[how], meter) for how in NAMES for client in clients[how]
            ]
            most = max(grown) / MIB
            report.figure(self._part, "CUDA IPC: device memory of a client", most, "MiB")
        meter.settled()
        return found


def _grown(engine: Actor, times: Times, meter: Meter | None) -> int:
    """Attach for the first time; what that adds to the device's memory."""
    before = meter.used() if meter else 0
    times.first.append(engine.ask(Engine.attach))
    after = meter.used() if meter else 0
    engine.ask(Engine.close)
    return after - before


def _right(engine: Actor) -> int:
    engine.ask(Engine.attach)
    return int(engine.ask(Engine.heads))


def _fetch(client: Actor, how: bytes, times: Times, meter: Meter) -> int:
    """Both figures of one client, and what it adds to the device's memory."""
    before = meter.used()
    times.first.append(client.ask(ipc.Client.attach, how))
    after = meter.used()
    wrong = client.ask(ipc.Client.wrong)
    if wrong:
        raise ValueError(f"{wrong} tensors do not hold what the server filled them with")
    times.again.append(statistics.median(client.ask(ipc.Client.repeat, how, AGAIN)))
    return after - before


def _tell_rank(report: Report, part: str, used: int, daemon: Daemon) -> None:
    """What the rank takes, now that its loader is gone."""
    told = daemon.status()
    beyond = used - told.arena_bytes
    report.nothing(part, "device memory of the rank beyond its arena", beyond)
    ratio = told.arena_bytes / told.tensor_bytes
    report.figure(part, "arena / tensors", ratio, "x", at_most=ARENA)
    report.figure(part, "chunks", told.chunks)


if __name__ == "__main__":
    sys.exit(main())
