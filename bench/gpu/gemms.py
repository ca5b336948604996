"""A plain user of FlashInfer: the products of a Llama-8B in FP8, tuned or looked up in a table.

A process of its own: `tune TABLE` or `use TABLE` on the first GPU that it sees; `use` with a file
that is not there is how it is without any. It answers with one line of JSON, the last.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from preloadd.loader.autotune import gemms
from preloadd.loader.autotune.problems import Kernel, Problem

DEVICE = "cuda:0"
LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
"""The matrices of each layer, as the checkpoint stores them."""

PROBLEMS = tuple(
    Problem(Kernel.FP8_CUBLAS, *shape, "bfloat16") for shape in sorted(set(LAYER.values()))
)


def main() -> int:
    """Tune or use, and tell."""
    what, path = sys.argv[1], Path(sys.argv[2])
    calls = gemms.Gemms(DEVICE)
    for problem in PROBLEMS:
        calls.run(problem, 1)  # compiles and loads what both need
    print(json.dumps(_tuned(calls, path) if what == "tune" else _used(calls, path)))
    return 0


def _tuned(calls: gemms.Gemms, path: Path) -> dict[str, float]:
    with _timed() as seconds, gemms.tuning(path):
        for problem in PROBLEMS:
            calls.run(problem, problem.rows)
    return {"seconds": seconds[0]}


def _used(calls: gemms.Gemms, path: Path) -> dict[str, float]:
    """All sizes, each looked up."""
    with _timed() as seconds, gemms.replaying(path) as counted:
        for problem in PROBLEMS:
            for rows in problem.batches:
                calls.run(problem, rows)
    return {"seconds": seconds[0], "hits": counted.hits, "misses": counted.misses}


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Seconds of the block, the GPU's work included, once it is over."""
    found: list[float] = []
    torch.cuda.synchronize()
    started = time.perf_counter()
    yield found
    torch.cuda.synchronize()
    found.append(time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
