"""What a rehearsal saves: `vllm serve` with CUDA graphs from disk where nothing is compiled, and
attached to a group that has warmed up, with one rank and with two.

Claims: the answers are the same, every worker attaches, and the rank tells how its warm-up came
out, also where this hardware has nothing to tune. Needs vLLM 0.33 or newer in this Python; `two`
needs two GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.daemon import Group
from bench.gpu.meter import Meter
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
    gpus = _gpus(ranks)
    if len(gpus) < ranks:
        session.report.absent(part, "everything", f"needs {ranks} GPUs")
        return
    (model,) = models(session, MODEL).values()
    words = (*ARGUMENTS, f"--tensor-parallel-size={ranks}", *ROOM)
    report = session.report
    with Serving(session.scratch, model, *words, environ=_caches(session, part, "disk")) as engine:
        cold_s, cold = engine.healthy_s, engine.answer()
    report.figure(part, "from disk, nothing compiled: until healthy", cold_s, "s")
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
        attach = attaching(group.sockets)
        with Serving(session.scratch, model, *words, *attach, environ=environ) as engine:
            report.figure(part, "attached: until healthy", engine.healthy_s, "s")
            report.figure(part, "from disk / attached", cold_s / engine.healthy_s, "x")
            report.figure(part, "workers that attached", engine.attached, at_least=ranks)
            report.holds(part, "the same answer as from disk", engine.answer() == cold)
            report.holds(part, "nothing is compiled anew", _COMPILING not in engine.told)


def _gpus(most: int) -> list[str]:
    """UUIDs of the first GPUs, as many as there are and are wanted."""
    found = []
    for number in range(most):
        try:
            with Meter(number) as meter:
                found.append(meter.uuid)
        except LookupError:
            break
    return found


def _caches(session: Session, part: str, whose: str) -> dict[str, str]:
    """An environment in which nothing that engines compile is there yet."""
    folder = session.scratch / part / whose
    return {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TRITON_CACHE_DIR": str(folder / "triton")}


if __name__ == "__main__":
    sys.exit(main())
