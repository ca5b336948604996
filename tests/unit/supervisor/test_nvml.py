"""The mapping of what NVML tells, by a driver that is none: it is scripted, call by call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from preloadd.supervisor.devices import Device
from preloadd.supervisor.nvml import Gpus, Nvml


class DriverError(Exception):
    """What the scripted driver raises."""


class Driver:
    """Two GPUs. A name in `broken` is a call that fails; old bindings hand out bytes."""

    NVMLError = DriverError
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815
    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self, *broken: str, as_bytes: bool = False) -> None:
        self.broken = set(broken)
        self.as_bytes = as_bytes
        self.pending: list[tuple[int, int]] = []
        self.registered: list[tuple[int, int]] = []
        self.open = 0
        self.slices = 0

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            raise_ = DriverError(f"{name}: GPU is lost")

            def fail(*_):
                raise raise_

            return fail
        return object.__getattribute__(self, name)

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.as_bytes else text

    def nvmlInit(self):  # noqa: N802
        self.open += 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self._text(f"GPU-{handle}")

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self._text("NVIDIA H200")

    def nvmlDeviceGetMemoryInfo(self, handle, version):  # noqa: N802
        assert version == self.nvmlMemory_v2
        if isinstance(handle, str):
            return SimpleNamespace(used=3, free=4, reserved=1, total=8)
        return SimpleNamespace(used=10 + handle, free=90 - handle, reserved=7, total=107)

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):  # noqa: N802
        assert counter == self.NVML_VOLATILE_ECC
        return (5, 1)[kind]

    def nvmlDeviceGetPersistenceMode(self, handle):  # noqa: N802
        if isinstance(handle, str):
            raise DriverError("Not Supported")
        return handle == 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):  # noqa: N802
        return self.slices if handle == 1 else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):  # noqa: N802
        if index != 2:
            raise DriverError("Not Found")
        return f"{handle}.{index}"

    def nvmlEventSetCreate(self):  # noqa: N802
        return object()

    def nvmlDeviceRegisterEvents(self, handle, kind, events):  # noqa: N802
        self.registered.append((handle, kind))

    def nvmlEventSetWait_v2(self, events, timeout_ms):  # noqa: N802
        assert timeout_ms == 0
        if not self.pending:
            raise DriverError("Timeout")
        device, xid = self.pending.pop(0)
        return SimpleNamespace(device=device, eventData=xid, eventType=8)


def opened(driver: Driver) -> Gpus:
    """GPUs that were asked about once."""
    fits: Nvml = driver
    gpus = Gpus(fits)
    gpus()
    return gpus


@pytest.mark.parametrize("as_bytes", [False, True])
def test_every_gpu_is_told(as_bytes):
    gpus = opened(Driver(as_bytes=as_bytes))
    assert gpus() == [
        Device("GPU-0", "NVIDIA H200", 10, 100, 5, 1, persistence=True),
        Device("GPU-1", "NVIDIA H200", 11, 100, 5, 1, persistence=False),
    ]


def test_parts_of_a_gpu_are_told_with_their_own_memory():
    driver = Driver()
    driver.slices = 7
    *_, part = opened(driver)()
    assert part == Device("GPU-1.2", "NVIDIA H200", 3, 7, 5, 1)
    assert driver.registered == [(0, 8), (1, 8)]  # Xid errors are those of whole GPUs


def test_xids_are_counted_and_logged(caplog):
    driver = Driver()
    gpus = opened(driver)
    assert driver.registered == [(0, 8), (1, 8)]
    driver.pending = [(1, 94), (1, 79), (1, 94)]
    assert [device.xids for device in gpus()] == [(), ((79, 1), (94, 2))]
    assert [device.xids for device in gpus()] == [(), ((79, 1), (94, 2))]
    assert caplog.text.count("GPU-1") == 3


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("nvmlDeviceGetTotalEccErrors", Device("GPU-0", "NVIDIA H200", 10, 100, persistence=True)),
        ("nvmlDeviceGetPersistenceMode", Device("GPU-0", "NVIDIA H200", 10, 100, 5, 1)),
        (
            "nvmlDeviceGetMaxMigDeviceCount",
            Device("GPU-0", "NVIDIA H200", 10, 100, 5, 1, persistence=True),
        ),
        (
            "nvmlDeviceGetMemoryInfo",
            Device("GPU-0", "NVIDIA H200", problem="nvmlDeviceGetMemoryInfo: GPU is lost"),
        ),
        ("nvmlEventSetCreate", Device("GPU-0", "NVIDIA H200", 10, 100, 5, 1, persistence=True)),
        (
            "nvmlDeviceRegisterEvents",
            Device("GPU-0", "NVIDIA H200", 10, 100, 5, 1, persistence=True),
        ),
        ("nvmlEventSetWait_v2", Device("GPU-0", "NVIDIA H200", 10, 100, 5, 1, persistence=True)),
    ],
)
def test_a_call_that_fails_costs_just_what_it_would_have_told(broken, expected):
    assert opened(Driver(broken))()[0] == expected


@pytest.mark.parametrize("broken", ["nvmlDeviceGetCount", "nvmlDeviceGetUUID", "nvmlDeviceGetName"])
def test_gpus_that_cannot_be_named_are_left_out(broken, caplog):
    assert opened(Driver(broken))() == []
    assert broken in caplog.text


def test_without_a_driver_there_are_no_gpus():
    driver = Driver("nvmlInit")
    gpus = Gpus(driver)
    assert list(gpus()) == list(gpus()) == []


def test_the_driver_is_not_touched_before_it_is_asked_and_opened_once():
    driver = Driver()
    gpus = Gpus(driver)
    assert driver.open == 0
    gpus()
    gpus()
    assert driver.open == 1
