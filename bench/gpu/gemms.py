"""A plain user of FlashInfer: the products of a Llama-8B, tuned or looked up in a table.

A process of its own: `tune DTYPE TABLE` or `use DTYPE TABLE`, with the dtype of the weights, on the
first GPU that it sees; `use` with a file that is not there is how it is without any. It answers
with one line of JSON, the last.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from preloadd.loader.autotune import gemms
from preloadd.loader.autotune.problems import FEW_ROWS, Kernel, Problem

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

_SHAPES = sorted(set(LAYER.values()))
PROBLEMS = {
    "F8_E4M3": [Problem(Kernel.FP8_CUBLAS, *shape, "bfloat16") for shape in _SHAPES],
    "BF16": [
        *(Problem(Kernel.BF16_CUBLASLT, *shape, "bfloat16") for shape in _SHAPES),
        *(Problem(Kernel.BF16_TINYGEMM, *shape, "bfloat16", FEW_ROWS) for shape in _SHAPES),
    ],
}
"""By the dtype of the weights, as safetensors names it."""

LOOKUPS = {
    dtype: sum(len(list(problem.batches)) for problem in found) for dtype, found in PROBLEMS.items()
}


def main() -> int:
    """Tune or use, and tell."""
    what, dtype, table = sys.argv[1:]
    calls, problems, path = gemms.Gemms(DEVICE), PROBLEMS[dtype], Path(table)
    for problem in problems:
        calls.run(problem, 1)  # compiles and loads what both need
    do = _tuned if what == "tune" else _used
    print(json.dumps(do(calls, problems, path)))
    return 0


def _tuned(calls: gemms.Gemms, problems: Sequence[Problem], path: Path) -> dict[str, float]:
    with _timed() as seconds, gemms.tuning(path):
        for problem in problems:
            calls.run(problem, problem.rows)
    return {"seconds": seconds[0]}


def _used(calls: gemms.Gemms, problems: Sequence[Problem], path: Path) -> dict[str, float]:
    """All sizes, each looked up."""
    with _timed() as seconds, gemms.replaying(path) as counted:
        for problem in problems:
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
