"""What a rank is composed of, by where its weights live."""

import sys
from dataclasses import replace

import pytest

from preloadd.domain.endpoint import Endpoint
from preloadd.domain.settings import Memory, Seeding
from preloadd.errors import ConfigError, DamagedManifest
from preloadd.memory.cuda.keeper import DeviceKeeper
from preloadd.memory.hip.keeper import DmaBufKeeper
from preloadd.memory.host import HostKeeper
from preloadd.rank.__main__ import _ends, _gpu, _loader

A = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"


@pytest.fixture
def on(settings):
    """Settings of a rank with this memory."""

    def on(memory: Memory, **more: str):
        instance = "CPU-0" if memory is Memory.HOST else A
        return replace(
            settings, instance=instance, model=replace(settings.model, memory=memory), **more
        )

    return on


def test_a_rank_in_host_memory_has_no_gpu(on, socket_dir):
    loader = _loader(on(Memory.HOST), socket_dir, {"CUDA_VISIBLE_DEVICES": "1"})
    assert loader.argv == [sys.executable, "-m", "preloadd.loader"]
    assert loader.environ == {"CUDA_VISIBLE_DEVICES": "1"}
    assert isinstance(loader.keeper, HostKeeper)
    assert _gpu(on(Memory.HOST), loader) is None


@pytest.mark.parametrize(
    ("memory", "variable", "keeper"),
    [
        (Memory.CUDA, "CUDA_VISIBLE_DEVICES", DeviceKeeper),
        (Memory.HIP, "ROCR_VISIBLE_DEVICES", DmaBufKeeper),
    ],
)
def test_a_loader_sees_the_ranks_gpu_alone(on, socket_dir, memory, variable, keeper):
    loader = _loader(on(memory), socket_dir, {"CUDA_VISIBLE_DEVICES": "1"})
    assert loader.environ == {variable: A}
    assert isinstance(loader.keeper, keeper)
    assert _gpu(on(memory), loader) is not None
    with pytest.raises(DamagedManifest):
        loader.keeper.verify(2, 4096)


def test_another_python_is_lent_this_package(on, socket_dir):
    loader = _loader(on(Memory.CUDA, python="/opt/x/bin/python"), socket_dir, {})
    assert loader.argv[0] == "/opt/x/bin/python"
    assert loader.environ["PYTHONPATH"] == str(socket_dir / "python")
    assert loader.environ["CUDA_VISIBLE_DEVICES"] == A


def test_a_rank_that_could_not_be_seeded_does_not_start(on):
    seeded = replace(on(Memory.HOST), seeding=Seeding(listen=Endpoint("127.0.0.1", 1)))
    assert _ends(on(Memory.HOST), [], kept=False) is None
    assert _ends(seeded, ["secret"], kept=False) is not None
    with pytest.raises(ConfigError, match="preloadctl token create"):
        _ends(seeded, [], kept=False)


def test_weights_that_are_there_are_worth_more_than_seeding(on, caplog):
    seeded = replace(on(Memory.HOST), seeding=Seeding(source=Endpoint("n", 1)))
    assert _ends(seeded, [], kept=True) is None
    assert "going on without seeding: there is no token to show to the source n:1" in caplog.text
