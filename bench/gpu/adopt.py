"""Weights that no process owns: a rank killed, every CUDA process gone, a write that must fail.

Claims: a rank killed with SIGKILL serves again in half a second without reading the checkpoint,
while an attached engine computes the same numbers before, meanwhile and after; weights stay in
device memory while no process with a CUDA context lives, and every byte is right afterwards; who
writes to them fails alone. The rank runs under `preloadd run --restart-ranks`, which is its fd
store; a service manager keeps descriptors in the same way.

The checkpoint is dense (see `checkpoints`): "every byte" are BLAKE3 digests of every tensor, from
the files and from the device. Takes about 60 s on an H200, and 40 s more where `--work` does not
have the 32 GiB of files yet.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.daemon import Adopted, Daemon
from bench.gpu.checkpoints import GIB, dense, digests
from bench.gpu.child import Actor, ChildError
from bench.gpu.engine import Computed, Engine
from bench.gpu.meter import MIB, Meter
from bench.gpu.session import Session, run

READY_S = 0.5
KILLS = 4
"""While an engine is attached; one more follows while none is. A launcher restarts a rank five
times in a minute and no more."""

SETTLE_S = 0.3
ALONE_S = 2.0
FILE_GIB = 2


def main() -> int:
    """Measure."""

    def size(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gib", type=float, default=32, help="size of the weights")

    return run("adopt", __doc__.partition("\n")[0], _measure, limit_s=150, also=size)


def _measure(session: Session) -> None:
    nbytes = int(session.arguments.gib * GIB)
    files = max(1, nbytes // (FILE_GIB * GIB))
    session.report.tell("making the checkpoint …")
    model = dense(session.work / f"dense-{session.arguments.gib:g}", files, nbytes)
    start = session.meter.settled() if session.meter else 0
    with ExitStack() as undo:
        hashing = undo.enter_context(ThreadPoolExecutor(1)).submit(digests, model)
        daemon = undo.enter_context(session.daemon(model))
        run_ = _Adoption(session, model, daemon, start, hashing.result)
        for name, act in run_.parts():
            session.part(name, act)
    if session.meter:
        left = session.meter.back_to(start) - start
        session.report.nothing("end", "device memory left behind", left)


class _Adoption:
    """One daemon, and what happens to it. `expected` gives the digests of the files."""

    def __init__(
        self,
        session: Session,
        model: Path,
        daemon: Daemon,
        start: int,
        expected: Callable[[], dict[str, str]],
    ) -> None:
        self._session, self._model, self._daemon, self._start = session, model, daemon, start
        self._expected = expected
        self._ready: list[float] = []
        self._read: list[int] = []

    def parts(self) -> list[tuple[str, Callable[[str], None]]]:
        """In the order in which they are to be done."""
        return [
            ("load", self._load),
            ("killed", self._killed),
            ("write", self._write),
            ("alone", self._alone),
            ("adoption", self._adoption),
        ]

    def _load(self, part: str) -> None:
        told, report = self._daemon.status(), self._session.report
        report.figure(part, "weights", told.tensor_bytes / GIB, "GiB")
        report.figure(part, "arena / tensors", told.arena_bytes / told.tensor_bytes, "x")
        report.figure(
            part, "load, page cache as it was", told.counters["generation_load_ms"] / 1000, "s"
        )
        if self._session.meter:
            beyond = self._session.meter.settled() - self._start - told.arena_bytes
            report.nothing(part, "device memory of the rank beyond its arena", beyond)

    def _killed(self, part: str) -> None:
        """The rank goes and comes back while an engine computes."""
        report = self._session.report
        with self._engine() as engine:
            engine.ask(Engine.compute)
            time.sleep(SETTLE_S)
            kills = [self._kill() for _ in range(KILLS)]
            spans = [(kill.killed, kill.served) for kill in kills]
            done: Computed = engine.ask(Engine.computed, spans)
        report.figure(part, "computed with the weights, times", done.times)
        report.figure(part, "of these while there was no rank", sum(done.within))
        report.figure(part, "different results", done.results, at_most=1)
        report.holds(part, "computed during every outage", all(done.within))

    def _write(self, part: str) -> None:
        """Two that write, one that computes meanwhile."""
        report = self._session.report
        with self._engine() as engine:
            engine.ask(Engine.compute)
            for how in ("kernel", "copy"):
                failure = self._overwrite(how)
                report.holds(
                    part, f"a write by a {how} fails in the writer", bool(failure), failure
                )
            time.sleep(SETTLE_S)
            done: Computed = engine.ask(Engine.computed, [])
            report.figure(part, "different results of a bystander", done.results, at_most=1)
            self._verify(part, "every byte after it, seen by the bystander", engine)

    def _alone(self, part: str) -> None:
        """No process with a CUDA context lives."""
        report, meter = self._session.report, self._session.meter
        if meter:
            self._alone_on(part, meter)
        else:
            self._kill()
        with self._engine() as engine:
            self._verify(part, "every byte afterwards, seen by the next engine", engine)
        told = self._daemon.status()
        report.holds(part, "still the generation that was loaded", bool(told.adopted))

    def _adoption(self, part: str) -> None:
        report = self._session.report
        what = "a rank's process start to readiness, after SIGKILL"
        report.figure(part, what, self._ready, "s", at_most=READY_S)
        report.figure(part, "the worst of them", max(self._ready), "s")
        report.figure(part, "bytes of the checkpoint read", max(self._read), at_most=0)

    def _alone_on(self, part: str, meter: Meter) -> None:
        report = self._session.report
        wanted = self._start + self._daemon.status().arena_bytes
        meter.back_to(wanted)
        report.figure(part, "processes with a CUDA context", len(meter.contexts()), at_most=0)
        seen = _Watch(meter)
        time.sleep(ALONE_S)
        self._kill()
        time.sleep(SETTLE_S)
        least, most = seen.stop()
        what = "device memory beyond the arena"
        # The process that a rank asks about its device, once it serves, has a little for a moment.
        report.figure(part, f"{what}, most at any time", (most - wanted) / MIB, "MiB")
        report.nothing(part, f"{what}, least while the rank is away", least - wanted)
        report.nothing(part, f"{what}, after a kill and an adoption", meter.settled() - wanted)

    @contextmanager
    def _engine(self) -> Iterator[Actor]:
        """One that is attached."""
        with self._session.engine(self._model, self._daemon) as engine:
            engine.ready().ask(Engine.attach)
            yield engine

    def _kill(self) -> Adopted:
        adopted = self._daemon.kill_rank()
        self._ready.append(adopted.seconds)
        self._read.append(adopted.bytes_read)
        time.sleep(SETTLE_S)
        return adopted

    def _overwrite(self, how: str) -> str:
        """How an engine fares that writes to the weights; empty if it succeeds."""
        with self._engine() as writer:
            try:
                writer.ask(Engine.overwrite, how)
            except ChildError as error:
                return str(error)
            finally:
                writer.kill()
        return ""

    def _verify(self, part: str, what: str, engine: Actor) -> None:
        expected = self._expected()
        started = time.monotonic()
        found = engine.ask(Engine.digests)
        wrong = [name for name in expected if found.get(name) != expected[name]]
        note = f"{len(expected)} digests, {time.monotonic() - started:.1f} s"
        self._session.report.holds(part, what, not wrong, f"{note}, wrong: {wrong[:3] or 'none'}")


class _Watch:
    """The least and the most memory in use while it looks."""

    def __init__(self, meter: Meter) -> None:
        self._seen = [meter.used()]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(meter,), daemon=True)
        self._thread.start()

    def stop(self) -> tuple[int, int]:
        """Both."""
        self._stop.set()
        self._thread.join()
        return min(self._seen), max(self._seen)

    def _look(self, meter: Meter) -> None:
        while not self._stop.wait(0.01):
            self._seen.append(meter.used())


if __name__ == "__main__":
    sys.exit(main())
