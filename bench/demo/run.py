"""The demo: a real model whose weights outlive its engine and its daemon.

Every step is checked; the first that is not as promised ends the demo with status 1.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from bench.demo.memory import rss
from bench.demo.model import make_model
from preloadd.protocol.messages import StatusTold
from preloadd.transport.status import ask_status

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
INSTANCE = "CPU-0"
PATIENCE_S = 60.0

console = Console(highlight=False, soft_wrap=True)


class Demo:
    """One run: a folder for sockets, a daemon, engines, and what was measured."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.sockets = folder / "sockets"
        self.reports: dict[str, list[dict[str, Any]]] = {}

    @property
    def socket(self) -> Path:
        """The rank's."""
        return self.sockets / INSTANCE / "rank.sock"

    def status(self) -> StatusTold:
        """What the rank tells of itself."""
        return ask_status(self.socket, timeout=5.0)

    @contextmanager
    def engine(self, case: str, *, attach: bool) -> Iterator[EngineProcess]:
        """An engine that has answered rightly once; its report is kept under `case`."""
        with EngineProcess(self.model, self.sockets if attach else None) as engine:
            self.reports.setdefault(case, []).append(engine.report)
            engine.must_answer()
            yield engine


class EngineProcess:
    """bench/demo/engine.py as a child, ended with the block."""

    def __init__(self, model: Path, sockets: Path | None) -> None:
        argv = [sys.executable, "-m", "bench.demo.engine", os.fspath(model)]
        if sockets is not None:
            argv += ["--socket-dir", os.fspath(sockets)]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.report = self._told()

    def must_answer(self) -> None:
        """Ask the question; the demo fails unless the answer is right."""
        assert self.process.stdin is not None
        self.process.stdin.write(QUESTION + "\n")
        self.process.stdin.flush()
        answer = self._told()["answer"]
        console.print(f"  [dim]{QUESTION}[/] {answer}")
        require(answer == ANSWER, f"the engine answered {answer!r}, not {ANSWER!r}")

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()

    def _told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        require(line != "", "an engine ended before it answered")
        told: dict[str, Any] = json.loads(line)
        return told


@contextmanager
def daemon(demo: Demo) -> Iterator[None]:
    """`preloadd run` in the background until the block ends."""
    argv = [sys.executable, "-m", "preloadd", "run", "--restart-ranks", "--log-level", "warning"]
    argv += ["--memory", "host", "--model", os.fspath(demo.model)]
    argv += ["--weight-cache-socket-dir", os.fspath(demo.sockets)]
    process = subprocess.Popen(argv)
    try:
        wait_until(lambda: _serves(demo, process))
        yield
    finally:
        process.terminate()
        code = process.wait(PATIENCE_S)
    require(code == 128 + signal.SIGTERM, f"`preloadd run` ended with {code} on SIGTERM, not 143")


def _serves(demo: Demo, process: subprocess.Popen[bytes]) -> bool:
    code = process.poll()
    require(code is None, f"`preloadd run` ended with {code} before it served")
    return demo.socket.is_socket() and demo.status().state == "serving"


def main() -> int:
    """Run the demo; 0 if everything was as promised."""
    started = time.monotonic()
    model = make_model()
    try:
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="preloadd-")))
            demo = Demo(model, folder)
            show(demo)
    except Unkept as error:
        console.print(f"[bold red]not as promised:[/] {error}")
        return 1
    console.print(f"everything was as promised; {time.monotonic() - started:.0f} s")
    return 0


def show(demo: Demo) -> None:
    """The steps."""
    step("an engine answers from disk")
    drop_from_page_cache(demo.model)
    with demo.engine("from disk, cold", attach=False):
        pass
    with demo.engine("from disk, page cache warm", attach=False):
        pass
    step("the daemon loads the model once: preloadd run")
    with daemon(demo):
        first = demo.status()
        step("an engine answers from the daemon's memory, is killed and started again")
        with demo.engine("attach", attach=True) as engine:
            engine.kill()
        with demo.engine("attach", attach=True):
            pass
        step("the rank daemon is killed while an engine is attached")
        with demo.engine("attach", attach=True) as engine:
            os.kill(first.pid, signal.SIGKILL)
            engine.must_answer()
            again = restarted(demo, first)
            engine.must_answer()
            leases = [lease.client for lease in again.leases]
            require(len(leases) == 1, f"one engine is attached, the daemon tells of {leases}")
            with demo.engine("attach after a daemon crash", attach=True):
                pass
        memory = rss(again.pid)
        tell_table(demo, first, again, memory)


def restarted(demo: Demo, first: StatusTold) -> StatusTold:
    """The status of the rank's next life, which must not have read the checkpoint."""
    wait_until(lambda: demo.status().pid != first.pid and demo.status().state == "serving")
    again = demo.status()
    require(again.adopted, "the restarted daemon did not adopt the parked weights")
    require(again.generation == first.generation, "the restarted daemon has other weights")
    require(first.counters["bytes_read"] > 0, "the first daemon has not read the checkpoint")
    read = again.counters["bytes_read"]
    require(read == 0, f"the restarted daemon read {read:,} bytes of the checkpoint again")
    return again


def tell_table(demo: Demo, first: StatusTold, again: StatusTold, memory: int) -> None:
    """What was measured."""
    table = Table(title=f"{demo.model.name}: {first.tensors} tensors, {first.tensor_bytes:,} bytes")
    table.add_column("")
    table.add_column("usable, ms", justify="right")
    table.add_column("all read, ms", justify="right")
    table.add_column("private, MB", justify="right")
    for case, reports in demo.reports.items():
        attached = [report["attach_ms"] for report in reports if report["attach_ms"] is not None]
        table.add_row(
            case,
            f"{statistics.median(attached):.1f}" if attached else "-",
            f"{statistics.median(report['load_ms'] for report in reports):.0f}",
            f"{statistics.median(report['rss_anon'] for report in reports) / 1e6:.1f}",
        )
        copied = max(report["arena_anonymous"] for report in reports)
        require(copied == 0, f"{case}: {copied:,} bytes of the shared weights became private")
    console.print(table)
    console.print(
        "usable: from connecting to having all tensors; all read: until the model is built and "
        "every weight was read once; private: anonymous memory that an engine adds"
    )
    console.print(
        f"rank daemon: {memory / 1e6:.0f} MB resident; ready in {first.ready_s:.2f} s reading "
        f"{first.counters['bytes_read']:,} bytes; after SIGKILL ready in {again.ready_s:.2f} s "
        f"reading {again.counters['bytes_read']:,} bytes"
    )


def drop_from_page_cache(model: Path) -> None:
    """Have the kernel forget the shards, as it does under memory pressure or a reboot."""
    for shard in model.glob("*.safetensors"):
        with shard.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Unkept(Exception):
    """Something was not as promised."""


def require(kept: bool, otherwise: str) -> None:  # noqa: FBT001
    """Fail the demo with `otherwise` unless `kept`."""
    if not kept:
        raise Unkept(otherwise)


def step(text: str) -> None:
    """Say what comes next."""
    console.print(f"[bold]* {text}[/]")


def wait_until(holds: Any) -> None:
    """Wait until `holds()` is true; errors count as not yet."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if holds():
                return
        except Unkept:
            raise
        except Exception as error:  # noqa: BLE001
            last: object = error
        else:
            last = "not yet"
        require(time.monotonic() < deadline, f"gave up waiting after {PATIENCE_S:g} s: {last}")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
