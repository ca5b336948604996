"""Which AMD GPUs a process sees, and whether their memory can be shared. Untested on hardware."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_size_t
from pathlib import Path

from preloadd.domain.devices import AMD_VISIBLE, Device, Probe
from preloadd.domain.settings import Memory
from preloadd.errors import DeviceFailed, NoSuchDevice
from preloadd.memory.hip.driver import (
    granularity,
    identify,
    initialised,
    name_of,
    numbers,
    require,
)
from preloadd.memory.visible import hints

NODE = "dev/kfd"
"""The device of AMD's driver, below the root."""

_NO_VMM = "this GPU or its driver does not support virtual memory management: update ROCm"


def probe(environ: Mapping[str, str], root: Path = Path("/"), library: Path | None = None) -> Probe:
    """What is to be seen here; never raises for what is not. `root` is where /sys, /dev are."""
    hides = hints(AMD_VISIBLE, environ)
    version = _version(root)
    try:
        hip = initialised(library)
        devices = tuple(_device(hip, number) for number in numbers(hip))
    except (NoSuchDevice, DeviceFailed) as error:
        return Probe(problem=f"{error}{_without_node(root)}", hint=hides, amd_driver=version)
    return Probe(devices, hint=hides, amd_driver=version)


def _device(hip: ctypes.CDLL, number: int) -> Device:
    total = c_size_t()
    require(hip, f"asking GPU {number} its size", hip.hipDeviceTotalMem(byref(total), number))
    pci = ctypes.create_string_buffer(32)
    require(hip, f"asking GPU {number} where it is", hip.hipDeviceGetPCIBusId(pci, 32, number))
    return Device(
        id=identify(hip, number),
        name=name_of(hip, number),
        memory=Memory.HIP,
        pci=pci.value.decode().lower(),
        total=total.value,
        problem="" if granularity(hip, number) else _NO_VMM,
    )


def _without_node(root: Path) -> str:
    """What else keeps AMD's GPUs from being seen, whatever its library says."""
    if (root / NODE).exists():
        return ""
    return f"; there is no /{NODE}: load the driver amdgpu, or let this container have the GPUs"


def _version(root: Path) -> str:
    """The kernel module's version, '' where it has none of its own."""
    try:
        return (root / "sys/module/amdgpu/version").read_text().strip()
    except OSError:
        return ""
