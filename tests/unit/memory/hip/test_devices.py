"""What a probe tells of AMD GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from preloadd.domain.devices import Device
from preloadd.domain.settings import Memory
from preloadd.memory.hip.devices import probe
from tests.unit.memory.stand_in import HIP_DEVICES, StandIn


def test_each_gpu_is_told(hip: StandIn, tmp_path: Path) -> None:
    module = tmp_path / "sys/module/amdgpu"
    module.mkdir(parents=True)
    (module / "version").write_text("6.12.12\n")
    hip.setenv("STAND_IN_DEVICES", ",".join(HIP_DEVICES))
    hip.setenv("HIP_VISIBLE_DEVICES", "1,0")
    found = probe(os.environ, tmp_path, hip.path)
    assert found.devices == (
        Device(HIP_DEVICES[1], "AMD Stand-In", Memory.HIP, "0000:1a:00.0", total=1 << 30),
        Device(HIP_DEVICES[0], "AMD Stand-In", Memory.HIP, "0000:1b:00.0", total=1 << 30),
    )
    assert (found.amd_driver, found.problem) == ("6.12.12", "")
    assert found.hint == "HIP_VISIBLE_DEVICES=1,0"


def test_none_is_a_problem_with_a_reason(hip: StandIn, tmp_path: Path) -> None:
    hip.setenv("STAND_IN_DEVICES", "")
    found = probe({}, tmp_path, hip.path)
    assert found.devices == ()
    assert "NO_DEVICE" in found.problem


def test_a_library_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    assert "install ROCm" in probe({}, tmp_path, tmp_path / "none.so").problem


def test_a_gpu_that_cannot_share_says_why(hip: StandIn, tmp_path: Path) -> None:
    hip.setenv("STAND_IN_NO_VMM", "1")
    (device,) = probe({}, tmp_path, hip.path).devices
    assert "virtual memory management" in device.problem


@pytest.mark.parametrize("odd", ["\udcff\udc80", "0\n", "0," * 50_000])
def test_an_odd_variable_is_told_in_a_short_line(hip: StandIn, tmp_path: Path, odd: str) -> None:
    found = probe({"HIP_VISIBLE_DEVICES": odd}, tmp_path, hip.path)
    assert found.hint.startswith("HIP_VISIBLE_DEVICES=")
    assert found.hint.isprintable()
    assert len(msgspec.json.encode(found)) < 2000
