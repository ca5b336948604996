"""What a rehearsal saves: `vllm serve` with CUDA graphs from disk where nothing is compiled, and
attached to a group that has warmed up, with one rank and with two.

Claims: the answers are the same, every worker attaches, loaders and rehearsal leave nothing on
their GPUs but the weights (the engine of two ranks has used NCCL), and the rank tells how its
warm-up came out, also where this hardware has nothing to tune. Needs vLLM 0.33 or newer in this
Python; `two` needs two GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.daemon import Group
from bench.gpu.meter import NOTHING, Meter
from bench.gpu.session import Session, run
from bench.gpu.vllm import models
from bench.gpu.vllm_serving import ROOM, Serving, attaching

MODEL = "small"
WARM_S = 400.0
RANKS = {"one": 1, "two": 2}
ARGUMENTS = ("--dtype=bfloat16", "--max-model-len=2048")
_COMPILING = "Compiling a graph"


def main() -> int:
    """Measure the parts that are asked for."""

    def also(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--parts", default=",".join(RANKS))

    return run("vllm_warm", __doc__.partition("\n\n")[0], _measure, limit_s=560, also=also)


def _measure(session: Session) -> None:
    for name in session.arguments.parts.split(","):
        session.part(name, lambda part: _warmed(session, part, RANKS[part]))


def _warmed(session: Session, part: str, ranks: int) -> None:
    """One model with so many ranks."""
    with ExitStack() as undo:
        try:
            meters = [undo.enter_context(Meter(number)) for number in range(ranks)]
        except LookupError as error:
            session.report.absent(part, "everything", f"needs {ranks} GPUs: {error}")
            return
        _measured(session, part, meters)


def _measured(session: Session, part: str, meters: list[Meter]) -> None:
    ranks, gpus = len(meters), [meter.uuid for meter in meters]
    (model,) = models(session, MODEL).values()
    words = (*ARGUMENTS, f"--tensor-parallel-size={ranks}", *ROOM)
    report = session.report
    with Serving(session.scratch, model, *words, environ=_caches(session, part, "disk")) as engine:
        cold_s, cold = engine.healthy_s, engine.answer()
    report.figure(part, "from disk, nothing compiled: until healthy", cold_s, "s")
    before = [meter.settled() for meter in meters]
    environ = _caches(session, part, "ours")
    folder = Path(tempfile.mkdtemp(dir=session.scratch))
    flags = ("--builder", "vllm", "--memory", "cuda", "--gpus", ",".join(gpus), "--", *words)
    began = time.monotonic()
    everything = {**os.environ, **environ}
    with Group(model, folder, *flags, environ=everything, patience=WARM_S) as group:
        told = group.serving(*gpus)
        report.figure(part, "group: until it serves, warmed up", time.monotonic() - began, "s")
        lines = [line for status in told for line in status.warmup]
        report.holds(part, "it tells how its warm-up came out", bool(lines), "; ".join(lines))
        for meter, start, status in zip(meters, before, told, strict=True):
            more = meter.back_to(start + status.arena_bytes) - start - status.arena_bytes
            name = f"GPU {meter.minor()}: left beyond the arena"
            report.figure(part, name, more, "B", at_most=NOTHING)
        attach = attaching(group.sockets)
        with Serving(session.scratch, model, *words, *attach, environ=environ) as engine:
            report.figure(part, "attached: until healthy", engine.healthy_s, "s")
            report.figure(part, "from disk / attached", cold_s / engine.healthy_s, "x")
            report.figure(part, "workers that attached", engine.attached, at_least=ranks)
            report.holds(part, "the same answer as from disk", engine.answer() == cold)
            report.holds(part, "nothing is compiled anew", _COMPILING not in engine.told)


def _caches(session: Session, part: str, whose: str) -> dict[str, str]:
    """An environment in which nothing that engines compile is there yet."""
    folder = session.scratch / part / whose
    return {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TRITON_CACHE_DIR": str(folder / "triton")}


if __name__ == "__main__":
    sys.exit(main())
