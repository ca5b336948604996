"""Two ranks with weights on a GPU: what the first has loaded, the second fills its arena from."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.meter import NOTHING
from preloadd.domain.settings import Seeding
from tests.gpu import device
from tests.gpu.inside import engine as inside
from tests.manager import Manage
from tests.waiting import eventually
from tests.weights_peers import checkpoint, free_place, slow_disk, token_file

SLOW_S = 8.0
"""For a piece of 8 MiB: who seems to have such a disk waits while a sender makes its context."""


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for several pieces in each of several streams."""
    return checkpoint(tmp_path_factory.mktemp("models") / "larger", 160 << 20)


def test_a_rank_has_its_weights_from_the_memory_of_another(
    rank_on: Manage, engine, larger: Path, tmp_path: Path
) -> None:
    before = device.used()
    place, token = free_place(), token_file(tmp_path)
    giving = Seeding(listen=place, token_file=token, weights=True)
    source = rank_on(larger, rank={"seeding": giving})
    taking = Seeding(source=place, token_file=token, weights=True, within=30.0)
    python = slow_disk(tmp_path, seconds=SLOW_S)
    target = rank_on(larger, rank={"seeding": taking, "python": python})
    told = target.status()
    assert told.counters["generation_bytes_peer"] == told.arena_bytes, target.log
    assert told.counters["bytes_read"] == 0
    number = engine(inside.attach, str(larger), socket_path=str(target.socket))
    assert engine(inside.unlike, number, str(larger)) == []
    engine.close()
    arenas = told.arena_bytes + source.status().arena_bytes
    eventually(
        lambda: abs(device.used() - before - arenas) <= NOTHING,
        lambda: f"a sender that is gone, with its context: {device.used() - before - arenas:+,} B",
    )
