"""`vllm serve` as users start it: until it is healthy, what it answers, and what it said."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from preloadd.linux.owner import Owner

ENGINE_S = 150.0
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
ROOM = ("--kv-cache-memory-bytes", str(2 << 30))
_PROMPT = [5, 9, 77]


Answer = tuple[str, list[float]]
"""What was said to a fixed prompt, and how likely each token of it was."""


def attaching(sockets: Path) -> tuple[str, ...]:
    """Arguments of an engine that attaches to the daemons of a folder, or does not start."""
    extra = {"socket_dir": os.fspath(sockets), "fallback": False}
    return ("--load-format", "ipc_cache", "--model-loader-extra-config", json.dumps(extra))


class Serving(Owner):
    """One engine of `vllm serve`, healthy `healthy_s` seconds after its start, until closed. What
    it says goes to a file of `scratch`. ChildProcessError with that if it does not come up."""

    def __init__(
        self, scratch: Path, model: Path, *words: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self._model, self._port = model, free_port()
        self._told = Path(tempfile.mkdtemp(prefix="serve-", dir=scratch), "told")
        command = [*VLLM, "serve", os.fspath(model), "--host", "127.0.0.1"]
        command += ["--port", str(self._port), *words]
        with ExitStack() as undo:
            began = time.monotonic()
            process = undo.enter_context(running(command, environ or {}, self._told))
            wait_healthy(self._port, process, self._told)
            self.healthy_s = time.monotonic() - began
            self._running = undo.pop_all()

    @property
    def told(self) -> str:
        """All that it said."""
        return self._told.read_text(errors="replace")

    @property
    def attached(self) -> int:
        """How many of its workers have attached."""
        return self.told.count("preloadd: attached in")

    def answer(self) -> Answer:
        """What it says to the same prompt as every other engine."""
        body = {"model": os.fspath(self._model), "prompt": _PROMPT, "max_tokens": 16}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps({**body, "temperature": 0, "logprobs": 1}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            (choice,) = json.load(answer)["choices"]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    def close(self) -> None:
        """End it, and all that it has started."""
        self._running.close()


@contextmanager
def running(
    command: list[str], environ: Mapping[str, str], told: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A command and all it starts, until the block ends."""
    with told.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_healthy(port: int, process: subprocess.Popen[bytes], told: Path) -> None:
    """Until it answers on `/health`; ChildProcessError with the end of `told` if it does not."""
    deadline = time.monotonic() + ENGINE_S
    while not _healthy(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ChildProcessError(told.read_text(errors="replace")[-3000:])
        time.sleep(0.2)


def free_port() -> int:
    """One of loopback that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return int(answer.status) == 200
    except OSError:
        return False
