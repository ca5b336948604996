"""Tunes, and uses what was tuned, with the real FlashInfer that takes the CPU for an H200.

A process of its own, told what to do in words such as `tune=ROOT` or `use=TABLE`. It answers with
one line of JSON, the last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests import flashinfer_on_cpu
from tests.flashinfer_on_cpu import Profiled

flashinfer_on_cpu.act_as_h200()

from flashinfer.autotuner import AutoTuner, autotune  # noqa: E402
from flashinfer.autotuner import autotuner as internals  # noqa: E402

from preloadd.errors import PreloadError  # noqa: E402
from preloadd.loader.autotune import gemms, tuning  # noqa: E402
from preloadd.loader.autotune.problems import Kernel, Problem  # noqa: E402
from preloadd.warmup.names import TableName  # noqa: E402

HASH = "ab" * 32
NAME = TableName(0, 1)
PROBLEMS = (
    Problem(Kernel.FP8_CUBLAS, 64, 128, "bfloat16"),
    Problem(Kernel.FP8_CUBLAS, 128, 64, "float16"),
    Problem(Kernel.BF16_CUBLASLT, 64, 256, "bfloat16"),
    Problem(Kernel.BF16_TINYGEMM, 64, 256, "bfloat16", 64),
)


def tune(root: Path) -> dict:
    told = []
    place = tuning.TableFile(root, HASH, NAME)
    try:
        entries, hits = tuning.tune(PROBLEMS, "cpu", place, lambda *done: told.append(done))
    except (PreloadError, OSError) as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"entries": entries, "hits": hits, "told": told, "profiled": Profiled.count}


def use(table: Path) -> dict:
    """As a plain consumer of FlashInfer: with the table, and without."""
    calls = gemms.Gemms("cpu")
    before = Profiled.count
    with gemms.replaying(table) as counted:
        for problem in PROBLEMS:
            for rows in (*problem.batches, 3, 40):
                if problem.kernel is not Kernel.BF16_CUBLASLT or rows not in (3, 40):
                    calls.run(problem, rows)
    with gemms.replaying(table.with_name("none.json")) as without:
        calls.run(PROBLEMS[0], 8)
    return {
        "hits": counted.hits,
        "misses": counted.misses,
        "without": without.misses,
        "profiled": Profiled.count - before,
    }


def load(table: Path) -> dict:
    """What FlashInfer's own loader makes of a file."""
    tuner = AutoTuner.get()
    with autotune(tune_mode=False):
        accepted = tuner.load_configs(str(table))
    return {"accepted": accepted, "entries": len(tuner._file_configs)}


def short(root: Path) -> dict:
    """On a GPU whose memory is not enough for large batches."""
    Profiled.oom = 2048
    try:
        return tune(root)
    finally:
        Profiled.oom = 1 << 30


def elsewhere(root: Path) -> dict:
    """On another GPU than the one that the table there is of."""
    before, here = internals._collect_metadata, internals._collect_metadata()
    internals._collect_metadata = lambda: here | {"gpu": "NVIDIA B200"}
    try:
        return tune(root)
    finally:
        internals._collect_metadata = before


ACTS = {act.__name__: act for act in (tune, use, load, short, elsewhere)}


def main() -> dict:
    found = {}
    for word in sys.argv[1:]:
        act, _, path = word.partition("=")
        AutoTuner.get().clear_cache()
        found[act] = ACTS[act](Path(path))
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
