"""What a probe tells of the GPUs a process sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from preloadd.domain.devices import Device, Probe
from preloadd.domain.settings import Memory
from preloadd.memory.cuda.devices import probe
from tests.driver_stand_in import build
from tests.unit.memory.stand_in import StandIn

ONE = "GPU-1a1b2c3d-0000-4000-8000-0000000000da"
PART = "MIG-1a1b2c3d-0000-4000-8000-0000000000db"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where /proc is, as NVIDIA's kernel module writes it."""
    module = tmp_path / "proc/driver/nvidia"
    gpu = module / "gpus/0000:1a:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text(
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 210\nGPU UUID: \t GPU-?\nDevice Minor: \t 3\n"
    )
    (module / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    return tmp_path


def test_each_gpu_is_told_without_using_it(cuda: StandIn, root: Path) -> None:
    cuda.setenv("STAND_IN_DEVICES", f"{ONE},{PART}")
    found = probe({}, root)
    assert found.devices == (
        Device(ONE, "NVIDIA Stand-In", Memory.CUDA, "0000:1a:00.0", minor=3, total=1 << 30),
        Device(PART, "NVIDIA Stand-In MIG 1g.18gb", Memory.CUDA, "0000:1b:00.0", total=1 << 30),
    )
    assert (found.driver, found.problem, found.hint) == ("580.95.05", "", "")
    assert cuda.alive() == 0


PROBING = """
import os, sys, msgspec
from pathlib import Path
from preloadd.memory.cuda.devices import probe
print(msgspec.json.encode(probe(os.environ, Path(sys.argv[1]))).decode())
"""


def test_what_the_kernel_does_not_tell_is_asked_of_nvml(
    cuda: StandIn, drivers: Path, root: Path
) -> None:
    """In a process of its own, which finds the library by its environment."""
    told = root / "proc/driver/nvidia/gpus/0000:1a:00.0/information"
    told.write_text(told.read_text().replace("Device Minor", "Device Major"))
    for persistence in (True, False):
        said = {"STAND_IN_DEVICES": ONE, "STAND_IN_PERSISTENCE": str(int(persistence))}
        command = [sys.executable, "-c", PROBING, str(root)]
        environ = {**os.environ, **build.cuda(drivers), **said}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        (device,) = msgspec.json.decode(done.stdout, type=Probe).devices
        assert (device.minor, device.persistence) == (5, persistence)


def test_what_hides_gpus_is_told(cuda: StandIn, tmp_path: Path) -> None:
    cuda.setenv("STAND_IN_DEVICES", f"{ONE},{PART}")
    cuda.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = probe(os.environ, tmp_path)
    assert [device.id for device in found.devices] == [PART]
    assert found.hint == "CUDA_VISIBLE_DEVICES=1"
    assert found.driver == ""


def test_none_visible_is_a_problem_with_a_reason(cuda: StandIn, tmp_path: Path) -> None:
    cuda.setenv("CUDA_VISIBLE_DEVICES", "")
    found = probe(os.environ, tmp_path)
    assert found.devices == ()
    assert "NO_DEVICE" in found.problem
    assert "CUDA_VISIBLE_DEVICES hides" in found.problem
    assert found.hint == "CUDA_VISIBLE_DEVICES="


def test_a_gpu_that_cannot_share_says_why(cuda: StandIn, tmp_path: Path) -> None:
    cuda.setenv("STAND_IN_NO_VMM", "1")
    (device,) = probe({}, tmp_path).devices
    assert "virtual memory management" in device.problem
    assert "memory = host" in device.problem


def test_a_gpu_that_does_not_answer_is_a_problem(cuda: StandIn, tmp_path: Path) -> None:
    cuda.fail("DeviceTotalMem", 999)
    found = probe({}, tmp_path)
    assert found.devices == ()
    assert "asking GPU 0 its size failed" in found.problem


@pytest.mark.parametrize("odd", ["\udcff\udc80", "0\n", "0," * 50_000])
def test_an_odd_variable_is_told_in_a_short_line(cuda: StandIn, tmp_path: Path, odd: str) -> None:
    found = probe({"CUDA_VISIBLE_DEVICES": odd}, tmp_path)
    assert found.hint.startswith("CUDA_VISIBLE_DEVICES=")
    assert found.hint.isprintable()
    assert len(msgspec.json.encode(found)) < 2000
