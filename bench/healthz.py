"""Probes of /healthz while one rank is stopped, against a real supervisor and real ranks.

Claims: the stopped rank is told as stuck within 5 s, and 10,000 requests at 200 a second, each on a
connection of its own, have a 99th percentile of at most 50 ms. A request is timed from the moment
it was due, so that a stall is charged to all requests that it holds up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import anyio

from bench.daemon import Daemon
from bench.demo.model import make_model

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PATIENCE_S = 30.0
RANKS = 3
PROMISED = {"stuck after, s": 5.0, "p99, ms": 50.0}
"""What the figures of these names are at most."""

FLAGS = ("--memory", "host", "--tensor-parallel-size", str(RANKS))


def main() -> int:
    """Measure and print JSON; 1 if a claim does not hold, which is said as well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    arguments = parser.parse_args()
    measured = measure(make_model(), arguments.requests, arguments.rate)
    sys.stdout.write(json.dumps(measured, indent=1) + "\n")
    missed, lines = verdict(measured)
    sys.stderr.writelines(f"{line}\n" for line in lines)
    return int(missed)


def verdict(measured: Mapping[str, float]) -> tuple[bool, list[str]]:
    """Whether a promise was missed, and a line for each."""
    met = {name: measured[name] <= most for name, most in PROMISED.items()}
    lines = [
        f"{name}: {measured[name]:g}, promised at most {most:g}: {'met' if met[name] else 'MISSED'}"
        for name, most in PROMISED.items()
    ]
    return not all(met.values()), lines


def measure(model: Path, requests: int, rate: float) -> dict[str, float]:
    """The figures of one run."""
    with (
        tempfile.TemporaryDirectory(prefix="preloadd-bench-") as folder,
        Daemon(model, Path(folder), "CPU-0", *FLAGS) as daemon,
        supervising(daemon.sockets) as port,
        stopped(daemon.status("CPU-1").pid) as since,
    ):
        wait_for(port, "stuck")
        stuck_after = time.monotonic() - since
        took, answers = anyio.run(probe, port, requests, rate)
        assert answers == {503}, f"status {answers}: a stopped rank is not healthy"
    took.sort()
    return {
        "requests": requests,
        "stuck after, s": round(stuck_after, 2),
        "median, ms": round(1000 * statistics.median(took), 2),
        "p99, ms": round(1000 * took[int(0.99 * len(took))], 2),
        "worst, ms": round(1000 * took[-1], 2),
    }


@contextmanager
def supervising(sockets: Path) -> Iterator[int]:
    """A supervisor of all ranks below `sockets`; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "preloadd.supervisor", "--socket-dir", os.fspath(sockets)]
    with subprocess.Popen([*command, "--port", str(port)]) as process:
        try:
            wait_for(port, "serving", every=True)
            yield port
        finally:
            process.terminate()


@contextmanager
def stopped(pid: int) -> Iterator[float]:
    """The process stands still in this block; since when."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_for(port: int, condition: str, *, every: bool = False) -> None:
    """Return once some rank (or every one of them) is told to be in this condition."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = [rank["condition"] == condition for rank in ranks(port)]
        if len(found) == RANKS and (all(found) if every else any(found)):
            return
        time.sleep(0.02)
    raise TimeoutError(f"the supervisor never told of a rank that is {condition}")


def ranks(port: int) -> list[dict[str, str]]:
    """What the supervisor tells of each rank; nothing while it does not answer yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/ranks", timeout=5) as answer:
            told: list[dict[str, str]] = json.loads(answer.read())["ranks"]
            return told
    except urllib.error.URLError:
        return []


async def probe(port: int, requests: int, rate: float) -> tuple[list[float], set[int]]:
    """Send requests at `rate` whether earlier ones were answered or not; seconds, and statuses."""
    took: list[float] = []
    statuses: set[int] = set()
    begin = anyio.current_time()

    async def once(due: float) -> None:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(REQUEST)
            answer = b"".join([part async for part in stream])
        took.append(anyio.current_time() - due)
        statuses.add(int(answer[9:12]))

    async with anyio.create_task_group() as probes:
        for number in range(requests):
            due = begin + number / rate
            await anyio.sleep_until(due)
            probes.start_soon(once, due)
    return took, statuses


if __name__ == "__main__":
    sys.exit(main())
