import dataclasses

import msgspec
import pytest

from preloadd.domain.placement import ExpertPlacement, Parallel, Placement
from preloadd.domain.settings import (
    CHUNK_BYTES,
    LAYOUTS,
    Access,
    Builder,
    Digest,
    Layout,
    Memory,
    ModelSettings,
    RankSettings,
    Reader,
    Running,
    Versions,
    resolved,
)
from preloadd.errors import ConfigError

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
        engine_args=("--dtype=float16",),
        layout=Layout.PROCESSED,
    ),
    access=Access(groups=("vllm",)),
    versions=Versions("0.33.0", "2.14.0", "5.0.0"),
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


def test_what_an_earlier_version_wrote_down_is_still_read():
    """A host that is upgraded goes on with the settings of before."""
    written = msgspec.json.decode(msgspec.json.encode(Running("0", 1, SETTINGS)))
    del written["settings"]["versions"]
    for name in ("engine_args", "layout"):
        del written["settings"]["model"][name]
    read = msgspec.json.decode(msgspec.json.encode(written), type=Running).settings
    assert (read.model.engine_args, read.model.layout) == ((), Layout.AUTO)
    assert read.versions == Versions()


def test_every_memory_has_a_layout_that_auto_is():
    assert set(LAYOUTS) == set(Memory)
    for memory, possible in LAYOUTS.items():
        assert resolved(Layout.AUTO, Builder.VLLM, memory) is possible[0]
        assert [resolved(layout, Builder.VLLM, memory) for layout in possible] == list(possible)


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("layout", Layout)
def test_layouts_that_cannot_be_are_told_with_those_that_can(memory, layout):
    if layout in LAYOUTS[memory] or layout is Layout.AUTO:
        return
    with pytest.raises(ConfigError, match=f"'{layout}' is no layout in {memory} memory") as told:
        resolved(layout, Builder.VLLM, memory)
    assert f"'{LAYOUTS[memory][0]}'" in str(told.value)


def test_native_weights_have_no_layout():
    assert resolved(Layout.AUTO, Builder.NATIVE, Memory.HOST) is Layout.AUTO
    with pytest.raises(ConfigError, match="choose the builder 'vllm'"):
        resolved(Layout.RAW, Builder.NATIVE, Memory.HOST)
