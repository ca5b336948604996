import os
import subprocess
import sys

import pytest

from preloadd.domain.settings import Memory
from preloadd.engine.options import Where
from preloadd.engine.place import Spot, gpu_spot, host_spot, open_place, spot
from preloadd.errors import ConfigError, NoSuchDevice, UnsupportedPlatformForIPCError
from preloadd.frameworks.torch import Platform, platform
from preloadd.memory.host import HostMapper
from tests.checkout import ROOT
from tests.driver_stand_in import build

CUDA = Platform("2.11.0+cu130", "13.0", None, sees_gpu=True)
ROCM = Platform("2.11.0+rocm7.1", None, "7.1.25424", sees_gpu=True)
BLIND = Platform("2.11.0+cu130", "13.0", None, sees_gpu=False)
BLIND_ROCM = Platform("2.11.0+rocm7.1", None, "7.1.25424", sees_gpu=False)
PLAIN = Platform("2.11.0+cpu", None, None, sees_gpu=False)

HOW = (
    r"""give options=\{"memory": "host"\} \(to vLLM, """
    r"""--model-loader-extra-config '\{"memory": "host"\}'\)$"""
)
"""In the words of either engine."""


# -- GPUs --


@pytest.mark.parametrize(("platform", "memory"), [(CUDA, Memory.CUDA), (ROCM, Memory.HIP)])
def test_the_memory_is_that_of_torchs_platform(platform, memory):
    assert gpu_spot("", platform) == Spot(memory, "cuda")
    assert gpu_spot("cuda:3", platform) == Spot(memory, "cuda:3")


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        (PLAIN, r"torch 2\.11\.0\+cpu is built for neither CUDA nor ROCm"),
        (BLIND, r"is built for CUDA 13\.0 but sees no GPU: .*nvidia-smi.*CUDA_VISIBLE_DEVICES"),
        (BLIND_ROCM, r"is built for ROCm 7\.1\.25424 but sees no GPU: .*rocm-smi"),
    ],
)
def test_without_a_gpu_it_says_why_and_how_to_use_host_memory(platform, why):
    with pytest.raises(UnsupportedPlatformForIPCError, match=f"{why}.*{HOW}"):
        gpu_spot("", platform)


@pytest.mark.parametrize("device", ["cpu", "xpu:0", "mps", "meta"])
def test_a_device_that_is_no_gpu_of_these_platforms_is_refused(device):
    with pytest.raises(UnsupportedPlatformForIPCError, match=f"device {device} has no GPU .*{HOW}"):
        gpu_spot(device, CUDA)


def test_this_process_is_asked_unless_it_is_to_be_host_memory():
    if platform().sees_gpu:
        assert spot(Where.AUTO).torch_device.startswith("cuda:")
    else:
        with pytest.raises(UnsupportedPlatformForIPCError):
            spot(Where.AUTO)
    assert spot(Where.HOST) == Spot(Memory.HOST, "cpu")


@pytest.mark.skipif(platform().sees_gpu, reason="a machine without a GPU is needed")
@pytest.mark.parametrize("memory", [Memory.CUDA, Memory.HIP])
def test_without_its_driver_there_is_no_such_device(memory):
    with pytest.raises(NoSuchDevice):
        open_place(Spot(memory, "cuda:0"), {})


SEEING = """
import os
from preloadd.domain.settings import Memory
from preloadd.engine.place import Spot, open_place
from preloadd.errors import NoSuchDevice
spots = [Spot(Memory.CUDA, f"cuda:{n}") for n in (0, 1, 0)]
places = [open_place(spot, os.environ, private=True) for spot in spots]
print(*[place.device for place in places], places[0].mapper._driver is places[2].mapper._driver)
print(places[0].mapper.private)
try:
    open_place(Spot(Memory.CUDA, "cuda:2"), os.environ)
except NoSuchDevice as error:
    print(error)
"""
ONE, OTHER = (f"GPU-{n}1111111-2222-3333-4444-555555555555" for n in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("visible", ["0,1", "1,0"])
def test_a_number_of_torchs_is_the_uuid_that_the_driver_has_for_it(tmp_path, visible):
    stand_in = {**build.cuda(tmp_path), "STAND_IN_DEVICES": f"{ONE},{OTHER}"}
    done = subprocess.run(
        [sys.executable, "-c", SEEING],
        env=os.environ | stand_in | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, second = (ONE, OTHER) if visible == "0,1" else (OTHER, ONE)
    seen = f"{first} {second} {first} True\nFalse\nthere is no GPU 2 here, only 2: "
    assert (done.stdout.startswith(seen), done.returncode) == (True, 0), done


# -- host memory --


@pytest.mark.parametrize("device", ["", "cpu"])
def test_host_memory_is_the_cpus(device):
    assert host_spot(device) == Spot(Memory.HOST, "cpu")


def test_host_memory_and_a_gpu_contradict_each_other():
    with pytest.raises(ConfigError, match=r'device cuda:1 contradicts the option memory: "host"'):
        host_spot("cuda:1")


def test_a_host_device_is_that_of_environment_and_rank():
    place = open_place(spot(Where.HOST), {"PRELOADD_DEVICES": "CPU-4,CPU-7"}, 1)
    assert (place.device, place.spot) == ("CPU-7", Spot(Memory.HOST, "cpu"))
    assert isinstance(place.mapper, HostMapper)
    assert not place.mapper.private
    assert open_place(spot(Where.HOST), {}, private=True).mapper.private
