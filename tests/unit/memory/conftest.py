"""Drivers that stand in for those of GPUs, in this process, and a check that nothing of them stays.

On a machine with NVIDIA's driver there is no place for another: tests/gpu and the contract tests
are for that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from preloadd.memory.cuda import driver as cuda_driver
from preloadd.memory.cuda.keeper import CONTROL
from preloadd.memory.hip import driver as hip_driver
from preloadd.memory.vmm import Driver
from tests.driver_stand_in import build
from tests.unit.memory.stand_in import CUDA_DEVICES, HIP_DEVICES, UNIT, StandIn


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the drivers that stand in are built, once."""
    return tmp_path_factory.mktemp("drivers")


@pytest.fixture
def cuda(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """CUDA with three devices, one of them for a start."""
    if Path(CONTROL).exists():
        pytest.skip("a process finds one driver, and the real one is here")
    library = build.cuda_here(drivers)
    monkeypatch.setenv("STAND_IN_DEVICES", CUDA_DEVICES[0])
    opened = cuda_driver.open_ordinal
    stand_in = StandIn(library, Path(), "cu", CUDA_DEVICES, opened, monkeypatch.setenv)
    yield from checked(stand_in, monkeypatch)


@pytest.fixture
def hip(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """HIP with three devices, one of them for a start."""
    path = build.hip(drivers)
    monkeypatch.setenv("STAND_IN_DEVICES", HIP_DEVICES[0])

    def opened(number: int) -> Driver:
        return hip_driver.open_ordinal(number, path)

    library = ctypes.CDLL(str(path))
    stand_in = StandIn(library, path, "hip", HIP_DEVICES, opened, monkeypatch.setenv)
    yield from checked(stand_in, monkeypatch)


@pytest.fixture(params=["cuda", "hip"])
def stand_in(request: pytest.FixtureRequest) -> StandIn:
    """Each of them."""
    found: StandIn = request.getfixturevalue(request.param)
    return found


def checked(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "STAND_IN_FAIL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STAND_IN_GRANULARITY", str(UNIT))
    assert stand_in.alive() == 0
    yield stand_in
    left = stand_in.alive()
    stand_in.end()
    assert left == 0, "something of the device was not given back"
