"""Which NVIDIA GPUs a process sees, and whether their memory can be shared. Makes no context."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from preloadd.domain.devices import VISIBLE, Device, Probe, minor_in
from preloadd.domain.settings import Memory
from preloadd.errors import DeviceFailed, NoSuchDevice
from preloadd.memory.cuda import nvml
from preloadd.memory.cuda.driver import (
    bindings,
    identify,
    name_of,
    numbers,
    sharing_problem,
    value,
)
from preloadd.memory.visible import hint


def probe(environ: Mapping[str, str], root: Path = Path("/")) -> Probe:
    """What is to be seen here; never raises for what is not. `root` is where /proc is found."""
    hides = hint(VISIBLE, environ)
    version = _version(root)
    try:
        cu = bindings()
        with nvml.session():
            devices = tuple(_device(cu, number, root) for number in numbers(cu))
    except (NoSuchDevice, DeviceFailed) as error:
        return Probe(driver=version, problem=str(error), hint=hides)
    return Probe(devices, version, hint=hides)


def _device(cu: ModuleType, number: int, root: Path) -> Device:
    device = identify(cu, number)
    pci = _pci(cu, number)
    minor = minor_in(_read(root / f"proc/driver/nvidia/gpus/{pci}/information"))
    return Device(
        id=device,
        name=name_of(cu, number),
        memory=Memory.CUDA,
        pci=pci,
        minor=nvml.minor(device) if minor < 0 else minor,
        total=int(value(cu, f"asking GPU {number} its size", cu.cuDeviceTotalMem, number)),
        persistence=nvml.persistence(device),
        problem=sharing_problem(cu, number),
    )


def _pci(cu: ModuleType, number: int) -> str:
    """The address on the bus, written as the kernel does: 0000:1b:00.0."""
    raw: bytes = value(cu, f"asking GPU {number} where it is", cu.cuDeviceGetPCIBusId, 32, number)
    return raw.partition(b"\0")[0].decode().lower()


def _version(root: Path) -> str:
    """The kernel module's version, '' where it cannot be read."""
    text = _read(root / "proc/driver/nvidia/version")
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", text, re.MULTILINE)
    return found[1] if found else ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
