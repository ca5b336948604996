"""What the benchmarks on the GPU share: arguments, a limit of time, parts that may fail alone."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.daemon import Daemon
from bench.gpu.child import Actor, ChildError, prepare
from bench.gpu.engine import Engine
from bench.gpu.loaders import Loading
from bench.gpu.meter import Meter
from bench.gpu.report import Report

HOST = "host"
HOST_INSTANCE = "CPU-0"
SHM = Path("/dev/shm")
GRACE_S = 20.0
DRY_RUN = "--dry-run"


class OutOfTimeError(Exception):
    """The run took as long as it may."""


@dataclass(frozen=True, slots=True)
class Session:
    """One run of one benchmark. Files it makes lie below `work`, small ones below `scratch`."""

    arguments: argparse.Namespace
    report: Report
    meter: Meter | None
    work: Path
    scratch: Path
    deadline: float

    @property
    def runs(self) -> int:
        """How many samples every median has."""
        return int(self.arguments.runs)

    def part(self, name: str, act: Callable[[str], None]) -> None:
        """Do one part; what goes wrong in it is kept, and costs no other part its figures."""
        if time.monotonic() > self.deadline:
            self.report.failed(name, "not begun: the time is over")
            return
        self.report.tell(f"{name} …")
        try:
            act(name)
        except Exception as error:  # noqa: BLE001 - the other parts have to go on
            self.report.failed(name, f"{type(error).__name__}: {error}")

    def daemon(self, model: Path) -> Daemon:
        """A rank for `model` where this run wants it, that has begun to load."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        if self.meter is None:
            return Daemon(model, folder, HOST_INSTANCE, "--memory", HOST)
        flags = ("--memory", "cuda", "--gpus", self.meter.uuid)
        return Daemon(model, folder, self.meter.uuid, *flags)

    def engine(self, model: Path, daemon: Daemon, *, forked: bool = True) -> Actor:
        """An engine process for what `daemon` holds; it gets ready by itself."""
        memory = HOST if self.meter is None else "auto"
        given = (os.fspath(model), os.fspath(daemon.sockets), memory)
        return Actor(Engine, *given, forked=forked)

    @contextmanager
    def holes(self) -> Iterator[Path]:
        """A folder for sparse checkpoints, for as long as the block lasts: on a tmpfs if there is
        one, where holes are read without filling the page cache."""
        base = SHM if os.access(SHM, os.W_OK) else self.scratch
        with tempfile.TemporaryDirectory(prefix="preloadd-bench-", dir=base) as folder:
            yield Path(folder)


def run(
    bench: str,
    description: str,
    act: Callable[[Session], None],
    *,
    limit_s: int,
    also: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> int:
    """A benchmark's main: parse, measure within the limit, print the table. 1 if a promise broke.

    `also` adds arguments of this benchmark alone.
    """
    parser = argparse.ArgumentParser(prog=f"bench.gpu.{bench}", description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="samples of every median")
    parser.add_argument("--memory", choices=("cuda", HOST), default="cuda")
    parser.add_argument("--gpu", default="", metavar="UUID", help="default: NVML's first")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep large files here, for reuse")
    parser.add_argument(
        "--limit", type=int, default=limit_s, metavar="SECONDS", help="give up then"
    )
    parser.add_argument(
        DRY_RUN, action="store_true", help="only look at these arguments and at the GPU"
    )
    also(parser)
    parsed = parser.parse_args()
    if parsed.dry_run:
        return _look(bench, parsed)
    _leave_on_sigterm()
    report = Report(bench, parsed.json)
    prepare(["bench.gpu.session", "bench.gpu.ipc"])
    with ExitStack() as undo:
        undo.callback(report.show)
        try:
            session = _session(parsed, report, undo)
        except (LookupError, ChildError) as error:
            report.failed("device", str(error))
            return 1
        _limit(parsed.limit)
        undo.callback(signal.alarm, 0)
        session.part(bench, lambda _: act(session))
    return int(report.bad)


def _look(bench: str, parsed: argparse.Namespace) -> int:
    """Whether there is a GPU to measure on, if one is wanted; 1 if not."""
    try:
        with ExitStack() as undo:
            if parsed.memory != HOST:
                undo.enter_context(Meter(parsed.gpu or 0))
    except LookupError as error:
        print(f"bench.gpu.{bench}: {error}", file=sys.stderr)
        return 1
    return 0


def _session(parsed: argparse.Namespace, report: Report, undo: ExitStack) -> Session:
    meter = None
    if parsed.memory != HOST:
        meter = undo.enter_context(Meter(parsed.gpu or 0))
        report.facts.update(meter.facts())
        with Actor(Loading) as first:
            # What the driver takes for itself at the first context stays with it.
            first.ready()
    scratch = Path(tempfile.mkdtemp(prefix="preloadd-bench-"))
    undo.callback(shutil.rmtree, scratch, ignore_errors=True)
    work = parsed.work.absolute() if parsed.work else scratch / "work"
    work.mkdir(parents=True, exist_ok=True)
    return Session(parsed, report, meter, work, scratch, time.monotonic() + parsed.limit)


def _leave_on_sigterm() -> None:
    """Then, too, temporary files are removed and processes ended."""

    def end(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def _limit(seconds: int) -> None:
    """Parts that have not begun by then are left out; one that goes on for long is broken off."""

    def give_up(*_: object) -> None:
        raise OutOfTimeError(f"not done {GRACE_S:.0f} s after the time was over")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(seconds + GRACE_S))
