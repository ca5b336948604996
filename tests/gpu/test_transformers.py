"""A model of transformers over weights in the memory of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.child import Child
from tests.gpu.inside import engine as inside
from tests.manager import Manage


@pytest.fixture
def llama(tmp_path: Path, engine: Child) -> Path:
    engine(inside.make_llama, str(tmp_path / "llama"))
    return tmp_path / "llama"


@pytest.mark.parametrize("mode", ["zero_copy", "copy"])
def test_it_answers_token_for_token_as_from_disk(
    rank_on: Manage, engine: Child, llama: Path, mode: str
) -> None:
    rank = rank_on(llama)
    options = {"socket_path": str(rank.socket), "mode": mode}
    told = engine(inside.same_answers, str(llama), options)
    assert told["ours"] == told["theirs"]
    assert len(told["ours"][0]) == 7 + 24
    assert told["logits"]
    assert told["devices"] == ["cuda:0"]
    assert told["own"] == []
    if mode == "zero_copy":
        # Buffers are the model's own, weights are not.
        assert told["allocated"] < told["moved"] / 10
    assert rank.status().state == {"zero_copy": "serving", "copy": "released"}[mode]
