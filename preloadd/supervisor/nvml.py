"""How the GPUs are, asked of the driver's management library, if there is one.

Whatever fails here leaves the supervisor without these facts and with all others.

Loaders know the library by a module of their own, `memory/cuda/nvml.py`: they ask of one GPU, once,
and let go of it. The supervisor keeps it open, since Xids are only told to those who wait for them,
and reaches no memory backend, just as no loader reaches the supervisor.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from preloadd.supervisor.devices import Device

log = logging.getLogger(__name__)


class Nvml(Protocol):
    """Of the module `pynvml`, what is used here. Every call raises `NVMLError`."""

    NVMLError: type[Exception]
    NVML_MEMORY_ERROR_TYPE_CORRECTED: int
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED: int
    NVML_VOLATILE_ECC: int
    nvmlEventTypeXidCriticalError: int  # noqa: N815 - NVML's own names
    nvmlMemory_v2: int  # noqa: N815

    nvmlInit: Callable[[], None]  # noqa: N815
    nvmlDeviceGetCount: Callable[[], int]  # noqa: N815
    nvmlDeviceGetHandleByIndex: Callable[[int], Any]  # noqa: N815
    nvmlDeviceGetUUID: Callable[[Any], str | bytes]  # noqa: N815
    nvmlDeviceGetName: Callable[[Any], str | bytes]  # noqa: N815
    nvmlDeviceGetMemoryInfo: Callable[[Any, int], Any]  # noqa: N815
    nvmlDeviceGetPersistenceMode: Callable[[Any], int]  # noqa: N815
    nvmlDeviceGetMaxMigDeviceCount: Callable[[Any], int]  # noqa: N815
    nvmlDeviceGetMigDeviceHandleByIndex: Callable[[Any, int], Any]  # noqa: N815
    nvmlDeviceGetTotalEccErrors: Callable[[Any, int, int], int]  # noqa: N815
    nvmlEventSetCreate: Callable[[], Any]  # noqa: N815
    nvmlDeviceRegisterEvents: Callable[[Any, int, Any], None]  # noqa: N815
    nvmlEventSetWait_v2: Callable[[Any, int], Any]  # noqa: N815


def load() -> Nvml | None:
    """The library's binding; None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    binding: Nvml = pynvml
    return binding


class Gpus:
    """All GPUs of this host, found when they are first asked about: that may block as well.

    Owns the library's state for the life of this process: letting go of a GPU that hangs, hangs.
    """

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._opened = False
        self._handles: dict[str, tuple[Any, str]] = {}
        self._events: Any = None
        self._xids: dict[str, Counter[int]] = {}

    def __call__(self) -> Sequence[Device]:
        """Every GPU as it is now. Blocks, mostly for a moment, and never raises."""
        if not self._opened:
            self._opened = True
            self._open()
        self._collect_xids()
        return [self._device(uuid) for uuid in self._handles]

    def _open(self) -> None:
        """Find the GPUs; there are none where there is no driver."""
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            log.info("GPUs are not looked at: %s", error)
            return
        whole: list[Any] = []
        try:
            for index in range(self._nvml.nvmlDeviceGetCount()):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                self._add(handle)
                whole.append(handle)
        except self._nvml.NVMLError as error:
            log.warning("not every GPU is looked at: %s", error)
        for handle in whole:
            self._add_slices(handle)
        self._listen(whole)

    def _add(self, handle: Any) -> None:  # noqa: ANN401 - NVML's own
        uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        self._handles[uuid] = handle, _text(self._nvml.nvmlDeviceGetName(handle))

    def _add_slices(self, handle: Any) -> None:  # noqa: ANN401 - NVML's own
        """The parts of a GPU (MIG), which have memory of their own; most have none."""
        try:
            for index in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with suppress(self._nvml.NVMLError):  # no part has this number
                    self._add(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except self._nvml.NVMLError as error:
            log.debug("parts of a GPU are not looked at: %s", error)

    def _device(self, uuid: str) -> Device:
        nvml, (handle, name) = self._nvml, self._handles[uuid]
        xids = tuple(sorted(self._xids.get(uuid, Counter()).items()))
        try:
            # The first version counts what the driver keeps for itself as used.
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        except nvml.NVMLError as error:
            # A GPU that fell off the bus says so here.
            return Device(uuid, name, xids=xids, problem=str(error))
        return Device(
            uuid,
            name,
            memory_used=int(memory.used),
            memory_total=int(memory.used + memory.free),
            ecc_corrected=self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            xids=xids,
            persistence=self._persistence(handle),
        )

    def _persistence(self, handle: Any) -> bool | None:  # noqa: ANN401 - NVML's own
        try:
            return bool(self._nvml.nvmlDeviceGetPersistenceMode(handle))
        except self._nvml.NVMLError:  # part of a GPU, or not on this system
            return None

    def _ecc(self, handle: Any, kind: int) -> int | None:  # noqa: ANN401 - NVML's own
        try:
            return int(
                self._nvml.nvmlDeviceGetTotalEccErrors(handle, kind, self._nvml.NVML_VOLATILE_ECC)
            )
        except self._nvml.NVMLError:  # no ECC, or switched off
            return None

    def _listen(self, handles: Sequence[Any]) -> None:
        """Have Xid errors reported from now on; earlier ones are nowhere to be asked for."""
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
            for handle in handles:
                nvml.nvmlDeviceRegisterEvents(
                    handle, nvml.nvmlEventTypeXidCriticalError, self._events
                )
        except nvml.NVMLError as error:
            log.info("Xid errors are not looked at: %s", error)

    def _collect_xids(self) -> None:
        nvml = self._nvml
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError:  # nothing more has come
                return
            number = int(event.eventData)
            self._xids.setdefault(uuid, Counter())[number] += 1
            log.error("GPU %s: the driver reports Xid %d: see the kernel log", uuid, number)


def _text(value: str | bytes) -> str:
    """Older bindings hand out bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
