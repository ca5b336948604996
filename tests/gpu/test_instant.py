"""Loading with the library instanttensor instead of our own reader."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.gpu.child import Child
from preloadd.domain.settings import Reader
from tests.gpu.inside import engine as inside
from tests.gpu.models import marked
from tests.gpu.ranks import attached
from tests.manager import Manage

NBYTES = 512 << 20


@pytest.mark.skipif(find_spec("instanttensor") is None, reason="instanttensor is not installed")
def test_every_byte_arrives(rank_on: Manage, engine: Child, tmp_path: Path) -> None:
    model = marked(tmp_path / "model", NBYTES, 16)
    rank = rank_on(model, reader=Reader.INSTANTTENSOR, chunk_bytes=NBYTES // 4)
    told = rank.status()
    assert told.chunks > 1
    assert told.counters["generation_bytes_direct"] == told.counters["generation_bytes_read"]
    assert told.counters["generation_bytes_read"] >= told.tensor_bytes
    assert engine(inside.unlike, attached(engine, rank), str(model)) == []
