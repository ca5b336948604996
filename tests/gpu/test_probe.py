"""What a loader's probe tells of the GPUs of this host, and which of them users can mean by it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from preloadd.domain.devices import Probe
from preloadd.domain.settings import Memory
from tests.gpu import device

Probing = Callable[..., Probe]


@pytest.fixture
def probe(environ: dict[str, str]) -> Probing:
    """What the loader says it sees; variables of its environment as keywords."""

    def look(**more: str) -> Probe:
        command = [sys.executable, "-m", "preloadd.loader", "--probe"]
        done = subprocess.run(command, env={**environ, **more}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        return msgspec.json.decode(line, type=Probe)

    return look


def smi(fields: str) -> list[list[str]]:
    """What nvidia-smi says of every GPU."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split(", ") for line in told.splitlines()]


def test_it_sees_what_nvidia_smi_sees(probe: Probing) -> None:
    told = probe()
    theirs = smi("uuid,name,memory.total,driver_version,persistence_mode")
    assert [(each.id, each.name) for each in told.devices] == [(u, n) for u, n, *_ in theirs]
    for ours, (_, _, mib, version, persistence) in zip(told.devices, theirs, strict=True):
        assert ours.total == pytest.approx(int(mib) << 20, rel=0.03)
        assert ours.persistence is (persistence == "Enabled")
        assert ours.memory is Memory.CUDA
        assert not ours.problem
        assert told.driver == version
    assert not told.problem


def test_it_knows_the_node_of_each(probe: Probing) -> None:
    for index, each in enumerate(probe().devices):
        assert each.minor == device.meter(index).minor()
        assert Path(f"/dev/nvidia{each.minor}").is_char_device()
        assert Path("/proc/driver/nvidia/gpus", each.pci.lower()).is_dir()


@pytest.mark.parametrize("form", ["index", "UUID", "beginning"])
def test_a_selection_by_environment_is_respected(probe: Probing, gpu: str, form: str) -> None:
    written = {"index": "0", "UUID": gpu, "beginning": gpu[:12]}[form]
    told = probe(CUDA_VISIBLE_DEVICES=written)
    assert [each.id for each in told.devices] == [gpu]


@pytest.mark.parametrize("written", ["", "-1", "GPU-00000000"])
def test_hidden_gpus_are_no_error_but_a_problem_with_its_cause(
    probe: Probing, written: str
) -> None:
    told = probe(CUDA_VISIBLE_DEVICES=written)
    assert not told.devices
    assert told.problem
    assert "CUDA_VISIBLE_DEVICES" in told.hint + told.problem
