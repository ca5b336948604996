"""A vLLM engine from disk, from `vllm preload`, and from preloadd: the same answers, how fast, and
what each costs. Needs vLLM 0.33 or newer in this Python."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.daemon import Daemon
from bench.gpu.session import Session, run
from bench.gpu.vllm_models import make
from bench.gpu.vllm_quantised import QUANTISED, Quantised
from bench.gpu.vllm_serving import (
    ENGINE_S,
    ROOM,
    VLLM,
    Serving,
    attaching,
    free_port,
    running,
    wait_healthy,
)
from preloadd.linux.owner import Owner

LARGE = "llama"
MANY = "many"
EAGER = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.5,  # two daemons have their part
    "kv_cache_memory_bytes": 2 << 30,
}
DAEMONS_ARGUMENTS = ("--dtype=bfloat16", "--max-model-len=2048", "--enforce-eager")


class Engines(Owner):
    """A `bench.gpu.vllm_engine` until closed. What it says goes to a file of `scratch`."""

    def __init__(self, scratch: Path) -> None:
        self._told = Path(tempfile.mkdtemp(prefix="engines-", dir=scratch), "told")
        with self._told.open("wb") as told:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.gpu.vllm_engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
            )
        self.import_s: float | None = None

    def start(self, way: Way, model: Path, **more: Any) -> dict[str, Any]:
        """Start an engine; what it took."""
        if self.import_s is None:
            self.import_s = self._answer()["import_s"]
        return self._order({"start": {"model": os.fspath(model), **EAGER, **way.order, **more}})

    def generate(self) -> tuple[Any, Any]:
        """Tokens and log-probabilities for the same prompts as every other engine."""
        answer = self._order({"generate": True})
        return answer["tokens"], answer["logprobs"]

    def stop(self) -> None:
        """End the engine."""
        self._order({"stop": True})

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    @property
    def told(self) -> str:
        """All that it said."""
        return self._told.read_text(errors="replace")

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], ENGINE_S)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            self._process.kill()
            raise ChildProcessError(f"the engine gave no answer: {self.told[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass(slots=True)
class Way:
    """One way to start an engine."""

    name: str
    order: dict[str, Any]


def models(session: Session, *names: str) -> dict[str, Path]:
    """Checkpoints, made if need be, in the page cache."""
    # By another process, so that this one never has a context on the GPU.
    subprocess.run(
        [sys.executable, "-m", "bench.gpu.vllm_models", os.fspath(session.work), *names],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    found = {name: make(session.work, name) for name in names}
    for folder in found.values():
        for file in folder.glob("*.safetensors"):
            with file.open("rb") as opened:
                while opened.read(16 << 20):
                    pass
    return found


@contextmanager
def upstream(session: Session, model: Path) -> Iterator[Callable[[], Way]]:
    """vLLM's own daemon on `model`, that has begun; how its engines start, once it is ready."""
    folder = Path(tempfile.mkdtemp(prefix="up-", dir=session.scratch))
    port = free_port()
    command = [*VLLM, "preload"]
    command += ["--model", os.fspath(model), *DAEMONS_ARGUMENTS]
    command += ["--weight-cache-socket-dir", os.fspath(folder)]
    command += ["--weight-cache-health-host", "127.0.0.1"]
    command += ["--weight-cache-health-port", str(port)]
    environ = {"VLLM_PLUGINS": ""}
    told = folder / "told"
    with running(command, environ, told) as process:

        def ready() -> Way:
            wait_healthy(port, process, told)
            extra = {"socket_dir": os.fspath(folder), "fallback": False}
            return Way("vllm preload", _from(extra))

        yield ready


@contextmanager
def ours(session: Session, model: Path, *more: str) -> Iterator[tuple[Way, Daemon]]:
    """preloadd on `model`, ready, and how its engines start; `more` are arguments of vLLM."""
    assert session.meter is not None
    # What engines make as they start is not measured here, and a rehearsal would have made it.
    flags = ("--memory", "cuda", "--gpus", session.meter.uuid, "--builder", "vllm")
    flags += ("--disable-flashinfer-autotune",)
    folder = Path(tempfile.mkdtemp(prefix="our-", dir=session.scratch))
    told = (*DAEMONS_ARGUMENTS, *more)
    with Daemon(model, folder, session.meter.uuid, *flags, "--", *told) as daemon:
        extra = {"socket_dir": os.fspath(daemon.sockets), "fallback": False}
        yield Way("preloadd", _from(extra) | {"ours": True}), daemon


def _from(extra: dict[str, Any]) -> dict[str, Any]:
    return {"load_format": "ipc_cache", "model_loader_extra_config": extra}


DISK = Way("disk", {"load_format": "auto"})


def compare(session: Session, part: str, name: str) -> None:
    """Engines three ways in turns, in one process, with both daemons on the GPU: what they answer,
    and what `load_model` takes."""
    (model,) = models(session, name).values()
    with ExitStack() as undo:
        engines = undo.enter_context(Engines(session.scratch))
        ready = undo.enter_context(upstream(session, model))
        mine, daemon = undo.enter_context(ours(session, model))
        theirs = ready()
        samples: dict[str, list[dict[str, Any]]] = {}
        answers = {}
        # The first of all finds nothing compiled, and counts for none.
        for turn in range(session.runs + 1):
            for way in (DISK, theirs, mine) if turn < 2 else (theirs, mine):
                took = engines.start(way, model)
                if turn:
                    samples.setdefault(way.name, []).append(took)
                if turn < 2:
                    answers[way.name, turn] = engines.generate()
                engines.stop()
        session.report.figure(part, "tensors", daemon.status().tensors)
        loads = {way: _told(session, part, way, taken) for way, taken in samples.items()}
        same = all(answer == answers[DISK.name, 0] for answer in answers.values())
        session.report.holds(part, "tokens and log-probabilities: the same three ways", same)
        disk, theirs_s, mine_s = (loads[way] for way in ("disk", "vllm preload", "preloadd"))
        session.report.figure(
            part,
            "load_model without the key: preloadd / vllm preload",
            mine_s / theirs_s,
            at_most={LARGE: 1.1, MANY: 1 / 3}.get(name),
        )
        session.report.figure(part, "load_model: disk / preloadd", disk / mine_s)


def _told(session: Session, part: str, way: str, samples: list[dict[str, Any]]) -> float:
    """Keep what starts took; seconds of `load_model` with counting, without key and lease."""

    def taken(key: str) -> list[float]:
        return [sample["taken"].get(key, 0.0) for sample in samples]

    def milliseconds(what: str, seconds: list[float]) -> float:
        return session.report.figure(part, f"{way}: {what}", [1e3 * s for s in seconds], "ms")

    # Ours asks for key and lease while vLLM counts memory, before `load_model`.
    loads = [a + b for a, b in zip(taken("load_model"), taken("counting"), strict=True)]
    milliseconds("load_model, counting included", loads)
    for key in ("key and lease", "building the model", "binding", "post-processing"):
        if any(taken(key)):
            milliseconds(f"of it {key}", taken(key))
    starts = [sample["start_s"] for sample in samples]
    session.report.figure(part, f"{way}: start of the engine", starts, "s")
    rest = [load - key for load, key in zip(loads, taken("key and lease"), strict=True)]
    return statistics.median(rest)


def large(session: Session, part: str) -> None:
    """The large model three ways."""
    compare(session, part, LARGE)


def many(session: Session, part: str) -> None:
    """A model of over a thousand tensors three ways."""
    compare(session, part, MANY)


def mixtral(session: Session, part: str) -> None:
    """Experts three ways."""
    compare(session, part, "mixtral")


def deepseek(session: Session, part: str) -> None:
    """Latent attention with experts three ways."""
    compare(session, part, "deepseek")


def memory(session: Session, part: str) -> None:
    """Device memory of the daemons, and engines whose daemon is killed."""
    assert session.meter is not None
    (model,) = models(session, LARGE).values()
    report, before = session.report, session.meter.settled()
    with ours(session, model) as (way, daemon):
        told = daemon.status()
        beyond = session.meter.settled() - before - told.arena_bytes
        report.nothing(part, "preloadd: beyond the arena", beyond)
        report.figure(part, "arena / tensors", told.arena_bytes / told.tensor_bytes, at_most=1.01)
        with Engines(session.scratch) as engines:
            engines.start(way, model)
            first, used = engines.generate(), session.meter.settled()
            adopted = daemon.kill_rank()
            report.figure(
                part, "rank killed: until the next one serves", adopted.seconds, "s", at_most=0.5
            )
            report.figure(part, "rank killed: bytes read by it", adopted.bytes_read, at_most=0)
            report.holds(part, "rank killed: engine goes on", engines.generate() == first)
            report.nothing(part, "rank killed: memory more", session.meter.settled() - used)
            with Engines(session.scratch) as others:
                others.start(way, model)
                same = others.generate() == first
            report.holds(part, "rank killed: next engine attaches", same)
    session.meter.back_to(before)
    with upstream(session, model) as ready:
        ready()
        beyond = session.meter.settled() - before - told.tensor_bytes
        report.figure(part, "vllm preload: beyond the tensors", beyond / 2**20, "MiB")


def graphs(session: Session, part: str) -> None:
    """Starts as users have them: a process of its own each, CUDA graphs, by phase."""
    (model,) = models(session, LARGE).values()
    with ours(session, model) as (way, _):
        for each in (DISK, way):
            with Engines(session.scratch) as engines:
                took = engines.start(each, model, enforce_eager=False)
                report, name = session.report, each.name
                report.figure(part, f"{name}: importing vLLM", engines.import_s or 0, "s")
                report.figure(part, f"{name}: start of the engine", took["start_s"], "s")
                for key, seconds in took["taken"].items():
                    if key.startswith("worker."):
                        report.figure(part, f"{name}: of it {key[7:]}", seconds, "s")


def room(session: Session, part: str) -> None:
    """Weights are charged once: there is as much room for the KV cache as with a load from disk."""
    (model,) = models(session, LARGE).values()
    half = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5}
    with ours(session, model) as (way, _), Engines(session.scratch) as engines:
        found = []
        for each in (DISK, way):
            engines.start(each, model, **half)
            line = [line for line in engines.told.splitlines() if "KV cache size" in line][-1]
            found.append(float("".join(c for c in line.rpartition("size:")[2] if c.isdigit())))
            engines.stop()
    session.report.figure(
        part, "tokens of KV cache: preloadd / disk", found[1] / found[0], at_least=0.99
    )


def served(session: Session, part: str) -> None:
    """`vllm serve` as users start it, over HTTP."""
    (model,) = models(session, "mixtral").values()
    with ours(session, model) as (_, daemon):
        words = (*attaching(daemon.sockets), *DAEMONS_ARGUMENTS, *ROOM)
        with Serving(session.scratch, model, *words) as engine:
            session.report.figure(part, "from start to healthy", engine.healthy_s, "s")
            text, _ = engine.answer()
            session.report.holds(part, "it answers", bool(text.strip()), text[:60])
            session.report.holds(part, "attached", engine.attached == 1)


def quantised(session: Session, part: str) -> None:
    """Quantised, from disk and from preloadd: the same answers, or a refusal with its reason."""
    made = models(session, *QUANTISED)
    with ExitStack() as undo:
        # Their daemons start at the same time: each takes long to import vLLM.
        starts = {
            name: ours(session, made[name], *_words(kind)) for name, kind in QUANTISED.items()
        }
        with ThreadPoolExecutor(len(starts)) as pool:
            started = dict(zip(starts, pool.map(_entered, starts.values()), strict=True))
        for name, outcome in started.items():
            if not isinstance(outcome, Exception):
                undo.push(starts[name])
        engines = undo.enter_context(Engines(session.scratch))
        for name, outcome in started.items():
            if isinstance(outcome, Exception):
                session.report.absent(part, name, f"no daemon: {_last_line(outcome)}")
                continue
            try:
                same = _alike(engines, made[name], outcome[0], QUANTISED[name])
                session.report.holds(part, f"{name}: the same as from disk", same)
            except ChildProcessError as error:
                session.report.absent(part, name, f"no engine: {_last_line(error)}")
                engines = undo.enter_context(Engines(session.scratch))


def _alike(engines: Engines, model: Path, way: Way, kind: Quantised) -> bool:
    answers = []
    for each in (DISK, way):
        engines.start(each, model, **(kind.arguments or {}))
        answers.append(engines.generate())
        engines.stop()
    return bool(answers[0] == answers[1])


def _entered(block: AbstractContextManager[tuple[Way, Daemon]]) -> tuple[Way, Daemon] | Exception:
    try:
        return block.__enter__()
    except Exception as error:  # noqa: BLE001 - how a daemon ends is what is asked
        return error


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "it said nothing"


def _words(kind: Quantised) -> Iterator[str]:
    """Arguments of `LLM` as those of `vllm serve`."""
    for name, value in (kind.arguments or {}).items():
        text = value if isinstance(value, str) else json.dumps(value)
        yield f"--{name.replace('_', '-')}={text}"


PARTS = {
    "mixtral": mixtral,
    "deepseek": deepseek,
    "large": large,
    "many": many,
    "quantised": quantised,
    "memory": memory,
    "room": room,
    "served": served,
    "graphs": graphs,
}


def main() -> int:
    """Every part, or those that are asked for."""

    def act(session: Session) -> None:
        for name in session.arguments.parts.split(","):
            session.part(name, lambda part: PARTS[part](session, part))

    return run(
        "vllm",
        __doc__ or "",
        act,
        limit_s=900,
        also=lambda parser: parser.add_argument("--parts", default=",".join(PARTS)),
    )


if __name__ == "__main__":
    sys.exit(main())
