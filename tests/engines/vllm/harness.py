"""vLLM's engines and the daemons of their weights, as their users start them, until a test ends."""

from __future__ import annotations

import atexit
import ctypes.util
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bench.daemon import Daemon, Group
from preloadd.linux.owner import Owner
from tests.checkout import ROOT

VENV = "PRELOADD_TEST_VLLM_VENV"
"""Environment: the virtual environment with vLLM, from the root of the repository."""

DEFAULT_VENV = ".venv-vllm"
PATIENCE_S = 180.0
END_S = 60.0

PROMPTS = ((5, 17, 300, 41), (7, 7, 7, 250, 9, 801, 33), tuple(range(40, 90)))
TOKENS = 24


class Missing(Exception):
    """There is no vLLM to test with; says what to do."""


def vllm_python() -> Path:
    """The interpreter of the environment with vLLM; Missing."""
    venv = ROOT / os.environ.get(VENV, DEFAULT_VENV)
    if venv == ROOT:
        raise Missing("the environment with vLLM was left out")
    if not (venv / ".installed").exists():
        raise Missing(f"no vLLM in {venv}: `make test` installs one")
    if not ctypes.util.find_library("numa"):
        raise Missing("vLLM needs libnuma.so.1 (Debian: apt install libnuma1)")
    return venv / "bin/python"


def prepare(python: Path, architectures: Iterable[str]) -> None:
    """Have vLLM look at the classes of models, if it has not. It keeps what it saw."""
    stamp = python.parents[1] / "cache/seen"
    names = " ".join(sorted(architectures))
    if stamp.exists() and stamp.read_text() == names:
        return
    subprocess.run(
        [python, "-m", "tests.engines.vllm.look", *names.split()],
        cwd=ROOT,
        env=environ(python),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    stamp.write_text(names)


def environ(python: Path, **more: str) -> dict[str, str]:
    """The environment of an engine: of this process, without what would choose for vLLM."""
    ours = ("VLLM_", "PRELOADD_", "HF_", "OMP_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {
        **inherited,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in the process that is told about it
        "TORCH_COMPILE_DISABLE": "1",  # or the first token takes many seconds, and a C++ compiler
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(python.parents[1] / "cache"),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": _sockets(),
        # Engines side by side on few processors: threads that spin for each other are slower.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        **more,
    }


@cache
def _sockets() -> str:
    """Where engines have their sockets, which those leave that are killed; gone at the end."""
    folder = tempfile.TemporaryDirectory(prefix="pl-vllm-")
    atexit.register(folder.cleanup)
    return folder.name


@dataclass(frozen=True)
class Said:
    """What an engine generated for one prompt: equal only if every bit of it is."""

    tokens: tuple[int, ...]
    cumulative: float
    logprobs: tuple[tuple[tuple[int, float], ...], ...]

    @property
    def chosen(self) -> tuple[float, ...]:
        """What it thought of each of its tokens."""
        steps = zip(self.tokens, self.logprobs, strict=True)
        return tuple(dict(step)[token] for token, step in steps)

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Said:
        steps = (tuple((number, seen) for number, seen in step) for step in told["logprobs"])
        return cls(tuple(told["tokens"]), told["cumulative"], tuple(steps))


@dataclass(frozen=True)
class Loaded:
    """How a load went, and what was said meanwhile.

    Measured only where the engine is one process: `load_ms` of the loader alone; `grown`, anonymous
    memory of the process; `shared` and `private`, bytes of the model's tensors in the arena and
    elsewhere; `arena_anonymous`, bytes of the arena in pages that were copied.
    """

    start_ms: float
    told: str = field(repr=False)
    load_ms: float = field(default=-1.0)
    grown: int = -1
    shared: int = -1
    private: int = -1
    arena_anonymous: int = -1

    @property
    def reason(self) -> str:
        """Why it is from disk; empty if nothing says that it is."""
        return "\n".join(line for line in self.told.splitlines() if "from disk" in line)


class Raised(Exception):
    """What an engine did not survive, or what it refused."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class Process(Owner):
    """A program of vLLM's environment with a process group of its own, which ends with it."""

    def __init__(
        self, argv: Sequence[str | Path], log: Path, environment: Mapping[str, str]
    ) -> None:
        self._log = log
        with log.open("wb") as told:
            self._process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                process_group=0,
            )
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def told(self) -> str:
        """All that it and its children said."""
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return not self._readable(self._pidfd, 0)

    def signal(self, number: int) -> None:
        """Send it alone a signal."""
        signal.pidfd_send_signal(self._pidfd, number)

    def ended(self) -> int:
        """Its exit status once it has ended, as subprocess has it; nothing of its group is left."""
        assert self._readable(self._pidfd, END_S), f"it does not end:\n{self.told}"
        # Before it is reaped: its number cannot be anybody else's yet.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.signal(signal.SIGKILL)
        self.ended()

    def close(self) -> None:
        """Have it end with its input, by force if it does not."""
        if self._pidfd < 0:
            return
        self._process.stdin.close()
        try:
            if not self._readable(self._pidfd, END_S):
                self.signal(signal.SIGKILL)
            self.ended()
        finally:
            self._process.stdout.close()
            os.close(self._pidfd)
            self._pidfd = -1

    def _readable(self, what: int, patience: float) -> bool:
        waiting = select.poll()
        waiting.register(what, select.POLLIN)
        return bool(waiting.poll(1000 * patience))


class Engine(Process):
    """A process that is told to load models one after the other, and to generate.

    It prepares itself while others do something else. What cannot be loaded is Raised.
    `as_it_is`: no faster than vLLM is where nobody tests it.
    """

    def __init__(self, python: Path, log: Path, *, as_it_is: bool = False, **more: str) -> None:
        argv = [python, "-m", "tests.engines.vllm.engine"]
        super().__init__(argv, log, environ(python, **more))
        self._due = 1  # the greeting
        self._begun = 0
        if not as_it_is:
            self._tell({"do": "settle"})

    def load(self, model: Path, **arguments: object) -> Loaded:
        """From disk, or as `arguments` of vLLM's `LLM` say."""
        self.begin_load(model, **arguments)
        return self.loaded()

    def attach(self, model: Path, sockets: Path, *, also: Any = None, **options: object) -> Loaded:
        """From the daemon whose sockets are in that folder, with other options if they are given;
        `also` are further arguments of `LLM`."""
        return self.load(model, **attaching(sockets, **options), **(also or {}))

    def begin_load(self, model: Path, **arguments: object) -> None:
        """Have it load; `loaded` is to be asked for next."""
        self._begun = len(self.told)
        self._tell({"do": "load", "model": str(model), **arguments})

    def loaded(self) -> Loaded:
        """How the load went that was begun last."""
        measured = self._answer()
        return Loaded(told=self.told[self._begun :], **measured)

    def generate(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Said]:
        """What it says to each of the prompts."""
        self._tell({"do": "generate", "prompts": prompts, "tokens": TOKENS})
        return [Said.parse(one) for one in self._answer()]

    def speculated(self) -> dict[str, int]:
        """How many tokens its draft guessed, and how many were right; for `disable_log_stats=False`
        alone."""
        self._tell({"do": "speculated"})
        return self._answer()

    def memory(self) -> dict[str, int]:
        """What the process holds now, in bytes."""
        self._tell({"do": "memory"})
        return self._answer()

    def drop(self) -> None:
        """Have it let go of its model."""
        self._tell({"do": "drop"})
        self._answer()

    def _tell(self, command: Mapping[str, object]) -> None:
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        self._due += 1

    def _answer(self) -> Any:
        """The answer to the last command; those before it are read over."""
        told = None
        while self._due:
            told = self._line()
            self._due -= 1
        if isinstance(told, dict) and "raised" in told:
            raise Raised(told["raised"], told["text"])
        return told

    def _line(self) -> Any:
        # One that asks for one answer at a time never leaves a second one in the buffer, except
        # for the greeting; and that is followed by nothing until a command was told.
        assert self._readable(self._process.stdout.fileno(), PATIENCE_S), (
            f"no answer in {PATIENCE_S:g} s:\n{self.told}"
        )
        line = self._process.stdout.readline()
        assert line, f"the engine ended with {self.ended()}:\n{self.told}"
        return json.loads(line)


def attaching(sockets: Path, **options: object) -> dict[str, object]:
    """The arguments of vLLM for weights in host memory."""
    where: dict[str, object] = {} if "socket_path" in options else {"socket_dir": str(sockets)}
    return {
        "load_format": "ipc_cache",
        "model_loader_extra_config": {"memory": "host", **where, **options},
    }


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder whose path is short enough for any socket below it."""
    return tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp")


def daemon(python: Path, model: Path, folder: Path, *flags: str) -> Daemon:
    """One rank that serves the model, in a block."""
    return Daemon(model, folder, "CPU-0", *_builder(python), *flags, environ=_serving(python))


def group(python: Path, model: Path, folder: Path, *flags: str) -> Group:
    """As many ranks as the flags say."""
    return Group(model, folder, *_builder(python), *flags, environ=_serving(python))


def _builder(python: Path) -> tuple[str, ...]:
    return ("--builder", "vllm", "--memory", "host", "--python", str(python))


def _serving(python: Path) -> dict[str, str]:
    """What a daemon's loader should have of an engine's environment: what it saw of models."""
    cache_root = str(python.parents[1] / "cache")
    return {**os.environ, "VLLM_CACHE_ROOT": cache_root, "VLLM_RPC_BASE_PATH": _sockets()}
