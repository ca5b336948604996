"""FlashInfer tuned by the loader of a real rank on a GPU, and a plain user of what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.gpu.autotune import layer
from bench.gpu.gemms import LOOKUPS
from preloadd.domain.settings import Warmup
from preloadd.warmup.names import OVERRIDE, TableName
from preloadd.warmup.table import parse
from preloadd.warmup.verdict import unknown_fields
from tests import waiting
from tests.gpu.inside import engine as inside
from tests.gpu.ranks import python_path
from tests.manager import Manage, Manager

pytestmark = [
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module", params=LOOKUPS)
def dtype(request: pytest.FixtureRequest) -> str:
    """Of the weights."""
    return request.param


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory, dtype: str) -> Path:
    """One layer of a Llama-8B."""
    return layer(tmp_path_factory.mktemp("models") / "layer", dtype)


@pytest.fixture
def tuning(rank_on: Manage, one_layer: Path, tmp_path: Path, monkeypatch) -> Iterator:
    """Starts a rank that tunes into `tmp_path`; kernels may have to be compiled first."""
    monkeypatch.setattr(waiting, "PATIENCE_S", 600.0)

    def start() -> Manager:
        manager = rank_on(one_layer, rank={"warmup": Warmup(autotune=True)}, start=False)
        manager.environ[OVERRIDE] = str(tmp_path)
        manager.start()
        manager.ready()
        return manager

    return start


def used(table: Path, dtype: str) -> dict:
    """What a plain user of FlashInfer has of the table."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.gemms", "use", dtype, str(table)],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_rank_tunes_once_and_the_table_answers_every_lookup(
    tuning, tmp_path: Path, dtype: str
) -> None:
    first = tuning()
    (line,) = first.status().warmup
    assert line.startswith("tables: tuned ")
    assert first.phases[-1] == "tuning"
    (path,) = tmp_path.rglob(str(TableName(0, 0)))
    table = parse(path.read_bytes(), str(path))
    assert sum(table.ops.values()) >= LOOKUPS[dtype], table.ops
    assert table.metadata["gpu"] not in (None, "unknown")
    assert set(unknown_fields(table.metadata)) <= {"cudnn_frontend_version", "cutlass_dsl_version"}
    before = path.read_bytes()
    first.signal(15)
    first.ended()
    (again,) = tuning().status().warmup
    assert again.startswith("tables: found on disk, ")
    assert path.read_bytes() == before
    found = used(path, dtype)
    assert (found["misses"], found["hits"]) == (0, LOOKUPS[dtype])


def test_the_weights_are_as_they_were_loaded(tuning, engine, one_layer: Path) -> None:
    """Tuning has the GPU to itself, and not the chunks."""
    manager = tuning()
    number = engine(inside.attach, str(one_layer), socket_path=str(manager.socket))
    assert engine(inside.unlike, number, str(one_layer)) == []
