"""Where an engine's weights are to be: in its GPU's memory, or in the host's where asked for.

A GPU is known to torch by number, to a daemon by UUID. The driver tells the one for the other, so
that the two sides meet whatever CUDA_VISIBLE_DEVICES says on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from preloadd.domain.ids import DeviceId
from preloadd.domain.settings import Memory
from preloadd.engine.discovery import host_device
from preloadd.engine.options import Where
from preloadd.errors import ConfigError, UnsupportedPlatformForIPCError
from preloadd.frameworks.torch import Platform, current_gpu, platform
from preloadd.linux.fds import widen
from preloadd.memory.api import Mapper
from preloadd.memory.host import HostMapper
from preloadd.memory.vmm import Driver, VmmMapper

CPU = "cpu"
_ASK_FOR_HOST = (
    'to attach to weights in host memory, give options={"memory": "host"} (to vLLM, '
    """--model-loader-extra-config '{"memory": "host"}')"""
)


@dataclass(frozen=True, slots=True)
class Spot:
    """Memory of the host, or of a GPU as torch calls it (`cuda:1`; so it says on ROCm too)."""

    memory: Memory
    torch_device: str


@dataclass(frozen=True, slots=True)
class Place:
    """A spot as daemons know it, and what maps memory there."""

    spot: Spot
    device: DeviceId
    mapper: Mapper


def spot(where: Where, device: str = "") -> Spot:
    """The spot an engine means. `device` as torch writes it, '' for torch's current GPU.

    UnsupportedPlatformForIPCError where that is no GPU and host memory was not asked for;
    ConfigError where the two contradict each other.
    """
    if where is Where.HOST:
        return host_spot(device)
    found = gpu_spot(device, platform())
    if found.torch_device != "cuda":
        return found
    return Spot(found.memory, f"cuda:{current_gpu()}")


def host_spot(device: str) -> Spot:
    """Host memory, for an engine that asked for it and for `device`."""
    if device.partition(":")[0] not in ("", CPU):
        raise ConfigError(
            f'device {device} contradicts the option memory: "host": leave one of them out'
        )
    return Spot(Memory.HOST, CPU)


def gpu_spot(device: str, platform: Platform) -> Spot:
    """GPU memory of torch's platform; without a number it is that of the current GPU."""
    if device.partition(":")[0] not in ("", "cuda"):
        raise UnsupportedPlatformForIPCError(
            f"device {device} has no GPU memory to share: {_ASK_FOR_HOST}"
        )
    if not platform.cuda and not platform.hip:
        raise UnsupportedPlatformForIPCError(
            f"this engine's torch {platform.torch} is built for neither CUDA nor ROCm, so it has "
            f"no GPU memory to share: install one that is; or, {_ASK_FOR_HOST}"
        )
    built = f"CUDA {platform.cuda}" if platform.cuda else f"ROCm {platform.hip}"
    if not platform.sees_gpu:
        raise UnsupportedPlatformForIPCError(
            f"this engine's torch {platform.torch} is built for {built} but sees no GPU: look at "
            f"the driver (nvidia-smi, rocm-smi), at CUDA_VISIBLE_DEVICES, and at the devices of "
            f"its container; or, {_ASK_FOR_HOST}"
        )
    return Spot(Memory.CUDA if platform.cuda else Memory.HIP, device or "cuda")


def open_place(
    spot: Spot, environ: Mapping[str, str], rank: int = 0, *, private: bool = False
) -> Place:
    """The device at `spot`, and its mapper. `rank` picks among several host devices.

    `private` maps host memory copy-on-write, so that the engine may write to it. GPUs have no such
    thing: their memory is read-only all the same.
    NoSuchDevice where the driver does not show the GPU or cannot share its memory, DeviceFailed.
    """
    if spot.memory is Memory.HOST:
        return Place(spot, host_device(environ, rank), HostMapper(private=private))
    driver = _driver(spot.memory, int(spot.torch_device.partition(":")[2]))
    return Place(spot, driver.device, VmmMapper(driver))


@cache
def _driver(memory: Memory, number: int) -> Driver:
    """One for each GPU, until the process ends: torch has the same context open as long."""
    # The bindings take their time, so they are imported where there is a GPU only; meanwhile room
    # is made for the descriptors of chunks.
    with ThreadPoolExecutor(1, thread_name_prefix="widening") as beside:
        beside.submit(widen)
        if memory is Memory.CUDA:
            from preloadd.memory.cuda.driver import open_ordinal

            return open_ordinal(number)
        from preloadd.memory.hip.driver import open_ordinal as open_hip

        return open_hip(number)
