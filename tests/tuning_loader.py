"""A loader that has something to tune: it takes weights in host memory for such of an H200.

What tunes says `TUNER` in its environment: `flashinfer`, the real one; `stand-in`, which writes a
table of its own; `fails`, `crashes`, `hangs`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from preloadd.domain.settings import Memory
from preloadd.loader import __main__ as loader
from preloadd.loader import warming
from preloadd.loader.autotune.problems import Kernel, Problem
from preloadd.loader.autotune.tuning import NotTuned, TableFile
from preloadd.warmup.folder import install
from preloadd.warmup.merge import Existing
from preloadd.warmup.table import Entry, Table
from tests.tuned import H200

PROBLEMS = (Problem(Kernel.FP8_CUBLAS, 64, 128, "bfloat16"),)
TABLE = Table({"('fp8_gemm', 'R', ())": Entry("R", 1)}, H200)


def stand_in(_, __, place: TableFile, tell: Callable) -> tuple[int, int]:
    """Writes a table."""
    tell(0, 1)
    install(place.root, place.config_hash, {place.name: TABLE}, Existing.REPLACE)
    return len(TABLE.entries), 1


def fails(*_) -> None:
    raise NotTuned("FlashInfer kept its defaults for 7 of 14 sizes")


def crashes(*_) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(*_) -> None:
    time.sleep(600)


def main() -> int:
    tuner = os.environ["TUNER"]
    if tuner == "flashinfer":
        from tests.flashinfer_on_cpu import act_as_h200

        act_as_h200()
    else:
        tune = {"stand-in": stand_in, "fails": fails, "crashes": crashes, "hangs": hangs}[tuner]
        warming.tuning = SimpleNamespace(tune=tune, TableFile=TableFile)
        warming.environment = lambda: dict(H200)
        warming.find_spec = lambda _: True
        warming.gemms = SimpleNamespace(why_not=lambda _: "")
    warming.problems = lambda *_: PROBLEMS

    def warm_up(settings, *more) -> None:
        on_gpu = replace(settings, model=replace(settings.model, memory=Memory.CUDA))
        warming.warm_up(on_gpu, *more)

    loader.warm_up = warm_up
    del sys.argv[1:]
    return loader.main()


if __name__ == "__main__":
    sys.exit(main())
