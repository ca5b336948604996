"""The loader's tuning pass with the real FlashInfer: what it writes, FlashInfer uses.

Each pass is a process of its own, in which the CPU is taken for an H200: only time, GPU and the
kernels themselves are replaced there (see `tests.flashinfer_on_cpu`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from preloadd.warmup.names import TableName
from preloadd.warmup.table import parse
from tests.tuned import H200

if not os.environ.get("CI") and find_spec("flashinfer") is None:
    pytest.skip("FlashInfer is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
HASH = "ab" * 32
BUCKETS = 21
"""Sizes of batches up to 8,192 that FlashInfer 0.7 tunes for."""


def acting(**acts: Path) -> dict:
    """What the process in `tuning.py` answers to each act; it takes long to start."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.tuning", *(f"{a}={p}" for a, p in acts.items())],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def table_in(root: Path) -> Path:
    return root / HASH / str(TableName(0, 1))


class Passes(NamedTuple):
    """A root with a table, what was answered to each act there, and the table before the last."""

    root: Path
    told: dict
    table: bytes


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Passes:
    """Tuned in one process, and used in another one, that knows nothing of the first."""
    root = tmp_path_factory.mktemp("tables") / "root"
    told = acting(tune=root, short=root.with_name("short"))
    table = table_in(root).read_bytes()
    path = table_in(root)
    return Passes(root, told | acting(use=path, load=path, elsewhere=root), table)


def test_a_pass_writes_one_sound_table_with_all_sizes(passes: Passes) -> None:
    path = table_in(passes.root)
    table = parse(passes.table, str(path))
    assert table.metadata == H200
    assert table.intact
    assert table.ops == {"bf16_gemm": BUCKETS + 7, "fp8_gemm": 2 * BUCKETS}
    assert passes.told["tune"]["entries"] == len(table.entries)
    assert {entry.tactic for key, entry in table.entries.items() if "Tiny" not in key} == {1}
    assert [path.name for path in passes.root.rglob("*.json")] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_tells_how_far_it_is_and_proves_the_table(passes: Passes) -> None:
    told = passes.told["tune"]
    assert told["told"] == [[done, 4] for done in range(5)]
    assert told["hits"] == 3 * 14 + 7
    assert told["profiled"] == 3 * BUCKETS * 3 + 7


def test_a_plain_consumer_has_every_lookup_answered(passes: Passes) -> None:
    used = passes.told["use"]
    assert (used["misses"], used["profiled"], used["without"]) == (0, 0, 1)
    assert used["hits"] == 3 * 14 + 7 + 3 * 2


def test_flashinfers_own_loader_takes_it(passes: Passes) -> None:
    entries = passes.told["tune"]["entries"]
    assert passes.told["load"] == {"accepted": True, "entries": entries}


def test_defaults_for_want_of_memory_are_no_success(passes: Passes) -> None:
    """FlashInfer raises nothing then, and saves what it has."""
    told = passes.told["short"]
    assert told["error"] == "NotTuned"
    assert "kept its defaults for" in told["text"]
    assert "(1.0 MiB are free), and no table was written" in told["text"]
    assert list(passes.root.with_name("short").rglob("*.json")) == []


def test_a_table_of_another_gpu_is_never_overwritten(passes: Passes) -> None:
    told = passes.told["elsewhere"]
    assert told["error"] == "TableConflict"
    assert "NVIDIA H200" in told["text"]
    assert table_in(passes.root).read_bytes() == passes.table
