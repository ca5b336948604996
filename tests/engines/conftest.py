"""Real daemons for real engines: `preloadd run` as an operator would start it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from bench.demo.model import make_model
from preloadd.errors import PreloadError
from preloadd.protocol.messages import StatusTold
from preloadd.transport.status import ask_status

PATIENCE_S = 60.0


class Running:
    """A foreground group; `sockets` is where engines find it."""

    def __init__(self, process: subprocess.Popen[bytes], sockets: Path) -> None:
        self.process = process
        self.sockets = sockets

    def status(self, instance: str = "CPU-0") -> StatusTold:
        return ask_status(self.sockets / instance / "rank.sock", timeout=5.0)

    def wait_serving(self, instance: str = "CPU-0", *, other_than: int = 0) -> StatusTold:
        """The status of a rank once it serves, from another process than `other_than`."""
        return self.wait(lambda: self._serving(instance, other_than))

    def wait(self, holds: Callable[[], StatusTold | None]) -> StatusTold:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the group ended"
            with contextlib.suppress(PreloadError):
                if (told := holds()) is not None:
                    return told
            time.sleep(0.02)
        raise AssertionError("gave up waiting")

    def kill_rank(self, instance: str = "CPU-0") -> StatusTold:
        """SIGKILL a rank; the status of its next life."""
        pid = self.status(instance).pid
        os.kill(pid, signal.SIGKILL)
        return self.wait_serving(instance, other_than=pid)

    def _serving(self, instance: str, other_than: int) -> StatusTold | None:
        told = self.status(instance)
        return told if told.state == "serving" and told.pid != other_than else None


Run = Callable[..., AbstractContextManager[Running]]


@pytest.fixture
def run(socket_dir: Path) -> Run:
    """Starts a group for a model, `with run(folder, "--flag", …) as running`."""

    @contextmanager
    def start(model: Path, *flags: str, ranks: int = 1) -> Iterator[Running]:
        argv = [sys.executable, "-m", "preloadd", "run", "--log-level", "warning"]
        argv += ["--memory", "host", "--model", str(model), *flags]
        argv += ["--weight-cache-socket-dir", str(socket_dir)]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
            running = Running(process, socket_dir)
            try:
                for rank in range(ranks):
                    running.wait_serving(f"CPU-{rank}")
                yield running
            finally:
                process.terminate()
                process.wait(PATIENCE_S)

    return start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            # Real models on a machine that may be doing other things.
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads that wait for each other on a busy machine are slower than one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's folder."""
    return make_model()
