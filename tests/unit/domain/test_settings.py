import dataclasses

import msgspec
import pytest

from preloadd.domain.placement import ExpertPlacement, Parallel, Placement
from preloadd.domain.settings import (
    CHUNK_BYTES,
    Access,
    Builder,
    Digest,
    Memory,
    ModelSettings,
    RankSettings,
    Reader,
)

SETTINGS = RankSettings(
    group="g",
    instance="CPU-1",
    socket_dir="/run/x",
    derived=True,
    model=ModelSettings(
        path="/m",
        name="org/m",
        revision="main",
        builder=Builder.NATIVE,
        memory=Memory.CUDA,
        reader=Reader.INSTANTTENSOR,
        digest=Digest.FULL,
        placement=Placement(
            Parallel(tensor=2, expert=True, expert_placement=ExpertPlacement.ROUND_ROBIN), 1
        ),
    ),
    access=Access(groups=("vllm",)),
)


def test_settings_survive_the_way_to_the_rank():
    assert msgspec.json.decode(msgspec.json.encode(SETTINGS), type=RankSettings) == SETTINGS
    assert str(SETTINGS.parsed_instance) == "CPU-1"


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SETTINGS.group = "other"


def test_every_memory_has_a_size_of_chunks_in_whole_pages():
    assert set(CHUNK_BYTES) == set(Memory)
    assert all(nbytes % (2 << 20) == 0 for nbytes in CHUNK_BYTES.values())
