"""HIP's calls, on a library that stands in. What both drivers do alike is in ../test_vmm.py."""

from __future__ import annotations

import os

import pytest

from preloadd.errors import DeviceFailed, NoSuchDevice, OutOfRoom
from preloadd.memory.hip.driver import open_device, open_ordinal
from tests.unit.memory.stand_in import HIP_DEVICES, UNIT, StandIn

ONE, TWO, THREE = HIP_DEVICES


def test_devices_are_opened_by_uuid_wherever_they_are_counted(hip: StandIn) -> None:
    hip.setenv("STAND_IN_DEVICES", ",".join(HIP_DEVICES))
    for order in ("0,1,2", "2,1"):
        hip.setenv("HIP_VISIBLE_DEVICES", order)
        driver = open_device(TWO, {}, hip.path)
        assert driver.device == TWO
        driver.close()
    assert open_ordinal(0, hip.path).device == THREE


def test_a_device_that_is_hidden_is_refused_with_those_that_are_not(hip: StandIn) -> None:
    hip.setenv("STAND_IN_DEVICES", ",".join(HIP_DEVICES))
    hip.setenv("HIP_VISIBLE_DEVICES", "0,2")
    with pytest.raises(NoSuchDevice) as caught:
        open_device(TWO, os.environ, hip.path)
    told = f"{TWO} is not to be seen here, only {ONE}, {THREE} (HIP_VISIBLE_DEVICES=0,2)"
    assert str(caught.value) == told
    with pytest.raises(NoSuchDevice, match=r"no GPU 2 here, only 2: .*ROCR_VISIBLE_DEVICES"):
        open_ordinal(2, hip.path)


def test_an_empty_variable_of_hips_hides_nothing_but_that_of_cuda_counts(hip: StandIn) -> None:
    hip.setenv("STAND_IN_DEVICES", ",".join(HIP_DEVICES))
    hip.setenv("HIP_VISIBLE_DEVICES", "")
    assert open_ordinal(2, hip.path).device == THREE
    hip.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(NoSuchDevice, match=f"only {ONE} .*; CUDA_VISIBLE_DEVICES=0"):
        open_device(TWO, os.environ, hip.path)
    hip.setenv("HIP_VISIBLE_DEVICES", "1")
    assert open_ordinal(0, hip.path).device == TWO


def test_no_device_is_told_with_what_may_hide_it(hip: StandIn) -> None:
    hip.setenv("STAND_IN_DEVICES", "")
    with pytest.raises(NoSuchDevice, match=r"NO_DEVICE.*/dev/kfd.* or CUDA_VISIBLE_DEVICES or "):
        open_ordinal(0, hip.path)


def test_a_driver_without_what_is_needed_is_refused(hip: StandIn) -> None:
    hip.setenv("STAND_IN_NO_VMM", "1")
    with pytest.raises(NoSuchDevice, match=f"{ONE} .*virtual memory management.*memory = host"):
        open_ordinal(0, hip.path)


def test_a_device_that_does_not_answer_failed(hip: StandIn) -> None:
    hip.fail("DeviceGetUuid", 999)
    with pytest.raises(DeviceFailed, match="asking GPU 0 who it is"):
        open_ordinal(0, hip.path)


def test_memory_that_cannot_be_pinned_is_told(hip: StandIn) -> None:
    driver = open_ordinal(0, hip.path)
    hip.fail("HostRegister", 2)
    with driver.current(), pytest.raises(OutOfRoom, match="4,096 bytes but the host's memory"):
        driver.pin(UNIT)
    hip.fail("HostRegister", 801)
    with driver.current(), pytest.raises(DeviceFailed, match="pinning 4,096 bytes"):
        driver.pin(UNIT)


@pytest.mark.parametrize("version", ["60443483", "70051831", "70125424"])
def test_a_descriptor_is_imported_as_this_version_wants_it(hip: StandIn, version: str) -> None:
    hip.setenv("STAND_IN_VERSION", version)
    driver = open_ordinal(0, hip.path)
    with driver.current():
        handle = driver.create(UNIT)
        with driver.export(handle) as fd:
            driver.release(driver.import_fd(fd.fileno()))
        driver.release(handle)
