"""What only the driver's management library tells of a GPU, where it is installed.

Nothing here is needed: whatever fails is left out. Opening the library takes tens of milliseconds,
so none of this is on the way of an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

from preloadd.domain.ids import DeviceId

NEGLIGIBLE = 1 << 30
"""Bytes: what a process holds that uses a GPU without weights. Less in use is not worth a word."""

MOST = 5
"""Processes that one text names."""

_GIB = 1 << 30

_T = TypeVar("_T")


class Holder(NamedTuple):
    """A process that holds memory of a GPU; `nbytes` is 0 where the driver does not tell."""

    pid: int
    name: str
    nbytes: int


@contextmanager
def session() -> Iterator[ModuleType | None]:
    """The library, open for a block; None where it is not. Questions in the block are fast."""
    nvml = _opened()
    try:
        yield nvml
    finally:
        if nvml is not None:
            with suppress(Exception):
                nvml.nvmlShutdown()


def _opened() -> ModuleType | None:
    try:
        import pynvml

        nvml: ModuleType = pynvml
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - there are several packages of this name, and broken ones
        return None
    return nvml


def holders(device: DeviceId) -> list[Holder] | None:
    """The processes on a GPU, largest first; None if nobody tells. Those of other containers may
    be missing."""

    def ask(nvml: ModuleType, handle: object) -> list[Holder]:
        found = list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        with suppress(Exception):  # no part of a GPU tells who draws on it
            found += nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        # One that computes and draws is told twice, with all that it holds.
        sizes: dict[int, int] = {}
        for process in found:
            sizes[process.pid] = max(sizes.get(process.pid, 0), process.usedGpuMemory or 0)
        return [Holder(pid, _name(pid), nbytes) for pid, nbytes in sizes.items()]

    found = _answer(device, ask)
    return found and sorted(found, key=lambda holder: -holder.nbytes)


def memory(device: DeviceId) -> tuple[int, int] | None:
    """Bytes of a GPU that are free, and that are used; None if nobody tells."""

    def ask(nvml: ModuleType, handle: object) -> tuple[int, int]:
        # The first version counts what the driver keeps for itself as used.
        found = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        return int(found.free), int(found.used)

    return _answer(device, ask)


def persistence(device: DeviceId) -> bool | None:
    """Whether the driver keeps a GPU ready while nobody uses it; None if nobody tells."""
    return _answer(device, lambda n, h: bool(n.nvmlDeviceGetPersistenceMode(_whole(n, h, device))))


def minor(device: DeviceId) -> int:
    """The number of a GPU's node, or of the GPU that it is part of; -1 if nobody tells."""
    found = _answer(device, lambda n, h: int(n.nvmlDeviceGetMinorNumber(_whole(n, h, device))))
    return -1 if found is None else found


def shares(device: DeviceId, used: int) -> str:
    """Who holds the `used` bytes of a GPU, as the middle of a sentence; '' if that says nothing."""
    found = holders(device) if used > NEGLIGIBLE else None
    if found is None:
        return ""
    others = [holder for holder in found if holder.pid != os.getpid()]
    told = [f"pid {h.pid} ({h.name}) holds {_amount(h.nbytes)}" for h in others[:MOST]]
    rest = used - sum(holder.nbytes for holder in found)
    if rest > NEGLIGIBLE and all(holder.nbytes for holder in found):
        # Memory behind a descriptor is in no process's account.
        told.append(
            f"{rest / _GIB:.1f} GiB are of no process that is seen here (weights that a daemon "
            "keeps, or another container's)"
        )
    return f", where {', '.join(told)}," if told else ""


def _amount(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes else "an unknown amount"


def _answer(device: DeviceId, ask: Callable[[ModuleType, object], _T]) -> _T | None:
    with session() as nvml:
        if nvml is None:
            return None
        try:
            return ask(nvml, nvml.nvmlDeviceGetHandleByUUID(device))
        except Exception:  # noqa: BLE001 - an old library or package, or no right to know
            return None


def _whole(nvml: ModuleType, handle: object, device: DeviceId) -> object:
    """The GPU that a part belongs to, or the GPU itself."""
    if not device.startswith("MIG-"):
        return handle
    whole: object = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return whole


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "of another container or gone"
