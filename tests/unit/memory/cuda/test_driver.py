"""CUDA's calls as the real binding makes them, on a driver that stands in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preloadd.domain.ids import DeviceId
from preloadd.errors import DeviceFailed, NoSuchDevice, OutOfRoom
from preloadd.memory.cuda.driver import CudaDriver, open_device, open_ordinal
from tests.driver_stand_in import build
from tests.unit.memory.stand_in import CUDA_DEVICES, UNIT, StandIn

ONE, TWO, THREE = CUDA_DEVICES


@pytest.fixture
def driver(cuda: StandIn) -> CudaDriver:
    driver = open_ordinal(0)
    yield driver
    driver.close()


def test_devices_are_opened_by_uuid_wherever_they_are_counted(cuda: StandIn) -> None:
    cuda.setenv("STAND_IN_DEVICES", ",".join(CUDA_DEVICES))
    for order in ("0,1,2", "2,1", f"{THREE},{TWO}"):
        cuda.setenv("CUDA_VISIBLE_DEVICES", order)
        driver = open_device(TWO, {})
        assert driver.device == TWO
        driver.close()
    assert open_ordinal(0).device == THREE
    cuda.end()


def test_a_part_of_a_gpu_is_a_device_of_its_own(cuda: StandIn) -> None:
    part = DeviceId("MIG-1a1b2c3d-0000-4000-8000-0000000000db")
    cuda.setenv("STAND_IN_DEVICES", part)
    driver = open_device(part, {})
    with driver.current():
        assert driver.room()[1] == f"{part} (NVIDIA Stand-In MIG 1g.18gb)"
    driver.close()


def test_a_device_that_is_hidden_is_refused_with_those_that_are_not(cuda: StandIn) -> None:
    cuda.setenv("STAND_IN_DEVICES", ",".join(CUDA_DEVICES))
    cuda.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    with pytest.raises(NoSuchDevice) as caught:
        open_device(TWO, os.environ)
    told = f"{TWO} is not to be seen here, only {ONE}, {THREE} (CUDA_VISIBLE_DEVICES=0,2)"
    assert str(caught.value) == told
    with pytest.raises(NoSuchDevice, match=r"no GPU 2 here, only 2: .*CUDA_VISIBLE_DEVICES"):
        open_ordinal(2)


@pytest.mark.parametrize(
    ("lacking", "told"),
    [("NO_VMM", "virtual memory management"), ("NO_FDS", "memory behind descriptors")],
)
def test_a_driver_without_what_is_needed_is_refused(cuda: StandIn, lacking: str, told: str) -> None:
    cuda.setenv(f"STAND_IN_{lacking}", "1")
    with pytest.raises(NoSuchDevice, match=f"{ONE} .*not support {told} .*memory = host"):
        open_ordinal(0)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (100, "CUDA_VISIBLE_DEVICES hides"),
        (36, "update the driver"),
        (803, "reboot"),
        (802, "nvidia-fabricmanager"),
        (46, "compute mode"),
        (999, "kernel log"),
        (12345, "too old or new .*12345"),
    ],
)
def test_a_driver_that_does_not_start_says_what_to_do(
    cuda: StandIn, code: int, remedy: str
) -> None:
    cuda.fail("Init", code)
    with pytest.raises(NoSuchDevice, match=remedy):
        open_ordinal(0)


def test_a_device_that_gives_no_context_failed(cuda: StandIn) -> None:
    cuda.fail("DevicePrimaryCtxRetain", 214)
    with pytest.raises(DeviceFailed, match=f"opening it failed on {ONE} .*ECC_UNCORRECTABLE.*Xid"):
        open_ordinal(0)


def test_a_device_without_room_for_a_context_is_full(cuda: StandIn) -> None:
    cuda.fail("DevicePrimaryCtxRetain", 2)
    with pytest.raises(OutOfRoom) as caught:
        open_ordinal(0)
    # No NVML is here to tell more.
    told = str(caught.value)
    assert told.startswith(
        f"opening it failed on {ONE} (NVIDIA Stand-In): CUDA_ERROR_OUT_OF_MEMORY"
    )
    assert "): free memory, or give the engines there less of it" in told


@pytest.mark.parametrize(
    ("used", "told"),
    [
        (1 << 20, "(NVIDIA Stand-In) leaves 149,534,277,632 bytes, too few for that"),
        (
            130 << 30,
            "or another container's), leaves 9,948,889,088 bytes, too few for that",
        ),
    ],
)
def test_how_full_a_device_is_that_gives_no_context_is_told_by_nvml(
    drivers: Path, used: int, told: str
) -> None:
    playing = {
        "STAND_IN_DEVICES": ONE,
        "STAND_IN_FAIL": "cuDevicePrimaryCtxRetain:2:0",
        "STAND_IN_MEMORY": str(149_535_326_208),
        "STAND_IN_USED": str(used),
    }
    assert told in opened_elsewhere({**build.cuda(drivers), **playing})


def test_a_block_within_a_block_asks_nothing_of_the_driver(
    driver: CudaDriver, cuda: StandIn
) -> None:
    with driver.current():
        cuda.fail("CtxPushCurrent", 205)
        with driver.current():
            assert driver.room()[0] > 0
        assert driver.room()[0] > 0
    with pytest.raises(DeviceFailed), driver.current():
        pytest.fail("the outer block had ended")


def test_the_granularity_is_asked_for(cuda: StandIn) -> None:
    for unit in (UNIT, 8 * UNIT):
        cuda.setenv("STAND_IN_GRANULARITY", str(unit))
        driver = open_ordinal(0)
        assert driver.granularity == unit
        driver.close()


def test_host_memory_is_pinned_by_registering_or_else_by_the_driver(
    driver: CudaDriver, cuda: StandIn
) -> None:
    with driver.current():
        registered = driver.pin(UNIT)
        assert registered.area is not None
        assert registered.address % UNIT == 0
        cuda.setenv("STAND_IN_NO_REGISTER", "1")
        allocated = driver.pin(UNIT)
        assert allocated.area is None
        assert not driver.registering
        for memory in (registered, allocated):
            memory.view[:] = bytes(UNIT)
            driver.unpin(memory)


def test_memory_that_cannot_be_pinned_is_told(driver: CudaDriver, cuda: StandIn) -> None:
    with driver.current():
        cuda.fail_pinning()
        with pytest.raises(OutOfRoom, match=r"4,096 bytes but .* may be pinned \(`ulimit -l`"):
            driver.pin(UNIT)


@pytest.mark.parametrize("code", [2, 801, 12345])
def test_whatever_registering_answers_the_driver_is_asked_for_memory(
    driver: CudaDriver, cuda: StandIn, code: int
) -> None:
    cuda.fail("MemHostRegister", code)
    with driver.current():
        driver.unpin(driver.pin(UNIT))


@pytest.mark.parametrize("function", ["DeviceGetCount", "DeviceGetUuid", "DevicePrimaryCtxRetain"])
def test_a_status_without_a_name_is_a_failure_of_opening(cuda: StandIn, function: str) -> None:
    cuda.fail(function, 12345)
    with pytest.raises(DeviceFailed, match=r"12345 .*kernel log"):
        open_ordinal(0)


def test_a_thread_gets_its_context_back_whatever_is_answered(
    driver: CudaDriver, cuda: StandIn
) -> None:
    with pytest.raises(ZeroDivisionError), driver.current():
        cuda.fail("CtxPopCurrent", 12345)
        raise ZeroDivisionError
    cuda.fail("", 0)
    driver.pop()


OPENING = """
from preloadd.errors import NoSuchDevice, OutOfRoom
from preloadd.memory.cuda.driver import open_ordinal
try:
    open_ordinal(0)
except (NoSuchDevice, OutOfRoom) as error:
    print(error)
"""


def opened_elsewhere(environ: dict[str, str]) -> str:
    given = {n: t for n, t in os.environ.items() if not n.startswith(("LD_LIB", "STAND_IN"))}
    command = [sys.executable, "-c", OPENING]
    done = subprocess.run(command, env={**given, **environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_binding_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/__init__.py").touch()
    told = opened_elsewhere({"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"})
    assert told.startswith(f"GPUs cannot be used from {sys.executable} (No module named 'cuda")
    assert told.endswith("install the packages cuda-bindings and nvidia-ml-py into it\n")


def test_without_the_driver_it_is_named(cuda: StandIn) -> None:
    assert "no driver of NVIDIA GPUs is found here: install it" in opened_elsewhere({})


def test_another_process_finds_the_driver_by_its_environment(cuda: StandIn, drivers: Path) -> None:
    assert "NO_DEVICE" in opened_elsewhere(build.cuda(drivers))
    found = opened_elsewhere({**build.cuda(drivers), "STAND_IN_DEVICES": ONE})
    assert found == ""


def test_a_device_that_an_odd_variable_hides_is_refused_in_a_line(cuda: StandIn) -> None:
    with pytest.raises(NoSuchDevice) as caught:
        open_device(TWO, {"CUDA_VISIBLE_DEVICES": "\udcff\n" + "0," * 50_000})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise OSError('libnvrtc.so: cannot open')", "libnvrtc.so: cannot open"),
        ("raise SystemError", "SystemError"),
        ("raise ImportError('one\\n' * 9999)", "one"),
        ("", "cuInit"),
    ],
)
def test_a_package_that_is_broken_is_told(tmp_path: Path, source: str, why: str) -> None:
    folder = tmp_path / "cuda/bindings"
    folder.mkdir(parents=True)
    for file in (folder.parent / "__init__.py", folder / "__init__.py"):
        file.touch()
    (folder / "driver.py").write_text(source)
    command = "from preloadd.memory.cuda.devices import probe; print(probe({}).problem)"
    given = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-c", command], env=given, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert why in done.stdout
    assert "install" in done.stdout
    assert len(done.stdout) < 1000
