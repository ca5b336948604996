"""CUDA's virtual memory management for one device. The only module that imports `cuda`.

Every status becomes an exception here. All work is done in the device's primary context, the one
that frameworks use as well; a thread gets its own context back after each use.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any

from preloadd.domain.devices import VISIBLE
from preloadd.domain.ids import DeviceId
from preloadd.errors import DamagedManifest, DeviceFailed, NoSuchDevice, PreloadError
from preloadd.linux.fds import OwnedFd
from preloadd.memory import pinned
from preloadd.memory.api import Rows
from preloadd.memory.cuda import nvml
from preloadd.memory.pinned import Pinned
from preloadd.memory.status import (
    DEINITIALIZED,
    HINT,
    Room,
    meaning_of,
    require_descriptor,
)
from preloadd.memory.visible import brief, hint

_Call = Callable[..., tuple[Any, ...]]
"""A call of the binding: answers with a status and values."""


def bindings() -> ModuleType:
    """The driver's binding, initialised; NoSuchDevice says what is missing.

    Imported here, since an engine's environment need not have it until it is to attach.
    """
    try:
        from cuda.bindings import driver
    except Exception as error:  # it is not there, is broken, or another package has its name
        raise NoSuchDevice(
            f"GPUs cannot be used from {sys.executable} ({brief(error) or type(error).__name__}): "
            "install the packages cuda-bindings and nvidia-ml-py into it"
        ) from error
    cu: ModuleType = driver
    try:
        (status,) = cu.cuInit(0)
    except (RuntimeError, ValueError, AttributeError) as error:
        if type(error).__name__ == "DynamicLibNotFoundError":
            raise NoSuchDevice(
                "no driver of NVIDIA GPUs is found here: install it, or let this container have "
                "the GPUs"
            ) from error
        # Either lacks a call, or the one answers what the other has no name for.
        raise NoSuchDevice(
            f"the driver of NVIDIA GPUs is too old or new for this Python ({brief(error)}): "
            "install another driver, or another cuda-bindings"
        ) from error
    if status:
        raise NoSuchDevice(
            f"no GPU can be used, {_words(cu, status)}: {_REMEDIES.get(status, HINT)}"
        )
    return cu


_REMEDIES = {
    34: "libcuda.so.1 is the stub of the toolkit: let the loader find the driver's own",
    36: "the driver is older than this binding of CUDA: update the driver",
    46: "another process has it for itself (compute mode): see nvidia-smi -q -d COMPUTE",
    100: f"none is there, or {VISIBLE} hides all",
    101: f"{VISIBLE} names one that is not there",
    802: "the fabric manager is not up yet: see systemctl status nvidia-fabricmanager",
    803: "library and kernel module are of different versions: reboot after an update",
    804: "the driver is older than this binding of CUDA: update the driver",
}


def open_device(device: DeviceId, environ: Mapping[str, str]) -> CudaDriver:
    """The device of this UUID; NoSuchDevice names those that are visible, and what hides others."""
    cu = bindings()
    seen = []
    for number in numbers(cu):
        found = identify(cu, number)
        if found == device:
            return CudaDriver(cu, number, device)
        seen.append(found)
    raise NoSuchDevice(f"{device} is not to be seen here, {_told(seen, environ)}")


def open_ordinal(number: int) -> CudaDriver:
    """The device that this process, and a framework in it, calls by this number; NoSuchDevice."""
    cu = bindings()
    if number not in numbers(cu):
        raise NoSuchDevice(
            f"there is no GPU {number} here, only {len(numbers(cu))}: they are counted from 0, and "
            f"{VISIBLE} may hide some"
        )
    return CudaDriver(cu, number, identify(cu, number))


def _told(seen: list[DeviceId], environ: Mapping[str, str]) -> str:
    told = f"only {', '.join(seen)}" if seen else "nor any other"
    hides = hint(VISIBLE, environ)
    return f"{told} ({hides})" if hides else told


def numbers(cu: ModuleType) -> range:
    """How this process, and a framework in it, may call its devices."""
    return range(value(cu, "counting the GPUs", cu.cuDeviceGetCount))


def identify(cu: ModuleType, number: int) -> DeviceId:
    """The UUID of the device with this number, as the driver's own tools write it."""
    uuid = value(cu, f"asking GPU {number} who it is", cu.cuDeviceGetUuid, number).bytes.hex()
    parts = uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]
    # A part of a GPU has a UUID of its own, and is told by its name: "NVIDIA H200 MIG 1g.18gb".
    return DeviceId(("MIG-" if " MIG " in name_of(cu, number) else "GPU-") + "-".join(parts))


def name_of(cu: ModuleType, number: int) -> str:
    """What the maker calls the device."""
    raw: bytes = value(cu, f"asking GPU {number} its name", cu.cuDeviceGetName, 128, number)
    return raw.partition(b"\0")[0].decode(errors="replace")


def sharing_problem(cu: ModuleType, number: int) -> str:
    """Why memory of the device cannot be shared by descriptors, and what to do; '' if it can."""
    attribute = cu.CUdevice_attribute
    vmm = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    fds = attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    for wanted, what in ((vmm, "virtual memory management"), (fds, "memory behind descriptors")):
        if not value(cu, f"asking GPU {number}", cu.cuDeviceGetAttribute, wanted, number):
            return (
                f"this GPU or its driver does not support {what} (as with WSL and some vGPUs): use "
                "another driver, or host memory (memory = host)"
            )
    return ""


def value(cu: ModuleType, doing: str, call: _Call, *arguments: object) -> Any:  # noqa: ANN401
    """What a call without a device answers; DeviceFailed if it fails."""
    status, found = _answer(doing, "", call, arguments)
    if status:
        raise DeviceFailed(f"{doing} failed: {_words(cu, status)}: {HINT}")
    return found


def _answer(doing: str, where: str, call: _Call, arguments: tuple[object, ...]) -> tuple[Any, ...]:
    """Status and values of a call; DeviceFailed where the binding has no words for them.

    It raises ValueError for a status newer than itself, RuntimeError for a call that the driver
    lacks.
    """
    try:
        return call(*arguments)
    except (ValueError, RuntimeError) as error:
        raise DeviceFailed(f"{doing} failed{where}: {error}: {HINT}") from error


def _words(cu: ModuleType, status: int) -> str:
    """Name and text that the driver has for a status."""
    _, name = cu.cuGetErrorName(status)
    _, text = cu.cuGetErrorString(status)
    return f"{(name or b'status %d' % status).decode()} ({(text or b'unknown').decode()})"


class CudaDriver:
    """One device of this process. Implements `memory.vmm.Driver`; owns a use of its context.

    `registering` says how host memory is pinned: our own large pages registered, or allocated by
    the driver, which is slower but may be allowed where the former is not.
    """

    def __init__(self, cu: ModuleType, number: int, device: DeviceId) -> None:
        """NoSuchDevice if its memory cannot be shared; DeviceFailed if it gives no context."""
        self._cu, self._number, self._device = cu, number, device
        self._name = name_of(cu, number)
        self._where = f" on {device} ({self._name})"
        if problem := sharing_problem(cu, number):
            raise NoSuchDevice(f"{device} ({self._name}): {problem}")
        self.registering = True
        self._granularity = 0
        self._fd_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = _properties(cu, number, self._fd_type)
        self._readable = _access(cu, number, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
        self._writable = _access(
            cu, number, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        )
        retain = cu.cuDevicePrimaryCtxRetain
        (self._context,) = self._ask(
            "opening it", retain, number, wanted=0, room=self._room_by_nvml
        )
        self._current = _Current(self)

    @property
    def device(self) -> DeviceId:
        """The UUID of the GPU, or of the part of one."""
        return self._device

    @property
    def granularity(self) -> int:
        """The least the driver allows: chunks are so large that it uses its largest pages anyway,
        and what a chunk has at its end beyond its tensors is wasted."""
        if not self._granularity:
            least = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            (self._granularity,) = self._ask(
                "asking for its granularity",
                self._cu.cuMemGetAllocationGranularity,
                self._properties,
                least,
            )
        return self._granularity

    def current(self) -> _Current:
        """The context, for this thread and the length of a block."""
        return self._current

    def push(self) -> None:
        """Make the context this thread's; use `current`."""
        # After the driver's end too: what is given up then needs no context, all else fails.
        self._give_up("using its context", self._cu.cuCtxPushCurrent, self._context)

    def pop(self) -> None:
        """Give the thread back the context it had; use `current`."""
        with suppress(ValueError):  # a status without a name: none matters here
            self._cu.cuCtxPopCurrent()

    def room(self) -> tuple[int, str]:
        """Bytes free now; the text says who has the rest, as far as NVML tells."""
        free, total = self._free()
        return free, self._used(total - free)

    def available(self) -> int:
        """Bytes free now."""
        return self._free()[0]

    def _free(self) -> tuple[int, int]:
        """Bytes free now, and of how many."""
        free, total = self._ask("asking for its free memory", self._cu.cuMemGetInfo)
        return free, total

    def _room_by_nvml(self) -> tuple[int, str]:
        """As `room`, where there is no context to ask in; DeviceFailed if nobody tells."""
        found = nvml.memory(self._device)
        if found is None:
            raise DeviceFailed(f"how much memory is free{self._where} is not told")
        free, used = found
        return free, self._used(used)

    def _used(self, nbytes: int) -> str:
        return f"{self._device} ({self._name}){nvml.shares(self._device, nbytes)}"

    def create(self, nbytes: int) -> int:
        """Allocate memory that can be exported."""
        doing = f"allocating {nbytes:,} bytes"
        (handle,) = self._ask(
            doing, self._cu.cuMemCreate, nbytes, self._properties, 0, wanted=nbytes, opens=True
        )
        return int(handle)

    def export(self, handle: int) -> OwnedFd:
        """A close-on-exec descriptor; OutOfDescriptors where the process has none left."""
        call = self._cu.cuMemExportToShareableHandle
        (fd,) = self._ask("exporting a chunk", call, handle, self._fd_type, 0, opens=True)
        owned = OwnedFd(int(fd))
        os.set_inheritable(owned.fileno(), False)  # noqa: FBT003 - the name says it
        return owned

    def import_fd(self, fd: int) -> int:
        """A handle of an exported chunk; DamagedManifest if the driver knows no such memory."""
        call = self._cu.cuMemImportFromShareableHandle
        (handle,) = self._ask(
            "importing a chunk", call, fd, self._fd_type, wanted=0, opens=True, foreign=True
        )
        return int(handle)

    def require_home(self, handle: int) -> None:
        """DamagedManifest if the memory is another GPU's, which could be mapped all the same."""
        call = self._cu.cuMemGetAllocationPropertiesFromHandle
        (properties,) = self._ask("asking where a chunk is", call, handle)
        if properties.location.id != self._number:
            raise DamagedManifest(
                f"a chunk is in the memory of another GPU than {self._device} ({self._name})"
            )

    def release(self, handle: int) -> None:
        """Give the handle up."""
        self._give_up("releasing a chunk", self._cu.cuMemRelease, handle)

    def reserve(self, nbytes: int, *, foreign: bool = False) -> int:
        """Addresses without memory, where the driver likes."""
        doing, call = f"reserving {nbytes:,} bytes of addresses", self._cu.cuMemAddressReserve
        (address,) = self._ask(doing, call, nbytes, 0, 0, 0, wanted=0, foreign=foreign)
        return int(address)

    def free(self, address: int, nbytes: int) -> None:
        """Give a whole reservation up."""
        self._give_up("giving addresses up", self._cu.cuMemAddressFree, address, nbytes)

    def map(self, address: int, nbytes: int, handle: int, *, foreign: bool = False) -> None:
        """Map from the start of a chunk; DamagedManifest if a foreign one has fewer bytes."""
        doing, call = f"mapping a chunk as {nbytes} bytes", self._cu.cuMemMap
        self._ask(doing, call, address, nbytes, 0, handle, 0, wanted=0, foreign=foreign)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take back one `map`."""
        self._give_up("unmapping a chunk", self._cu.cuMemUnmap, address, nbytes)

    def allow(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Access for this device alone: each more would cost every attachment as much again."""
        access = self._writable if writable else self._readable
        call = self._cu.cuMemSetAccess
        self._ask("setting access", call, address, nbytes, access, 1, wanted=0)

    def clear(self, address: int, nbytes: int) -> None:
        """Zeros, all there when this returns, whatever queue writes next."""
        call = self._cu.cuMemsetD32Async
        self._ask("clearing a chunk", call, address, 0, nbytes // 4, 0, wanted=0)
        self.wait(0)

    def synchronize(self) -> None:
        """Wait for everything that was asked of the context."""
        self._give_up("waiting for its work", self._cu.cuCtxSynchronize)

    def pin(self, nbytes: int) -> Pinned:
        """Large pages of ours, or what the driver allocates where it cannot register them."""
        if self.registering:
            memory = pinned.allocate(nbytes)
            try:
                call = self._cu.cuMemHostRegister
                self._ask("registering host memory", call, memory.address, nbytes, 0)
            except PreloadError:
                memory.release()
                # Not every driver, nor every sandbox, can. One that cannot need not be asked again.
                self.registering = False
            else:
                return memory
        doing, call = f"allocating {nbytes:,} bytes of pinned host memory", self._cu.cuMemHostAlloc
        (address,) = self._ask(doing, call, nbytes, 0, wanted=nbytes, room=pinned.room)
        return pinned.foreign(int(address), nbytes)

    def unpin(self, memory: Pinned) -> None:
        """Undo `pin`, in the way it was done."""
        if memory.area is None:
            memory.release()
            self._give_up("unpinning host memory", self._cu.cuMemFreeHost, memory.address)
        else:
            self._give_up("unpinning host memory", self._cu.cuMemHostUnregister, memory.address)
            memory.release()

    def open_queue(self) -> int:
        """A stream that does not wait for the default one."""
        flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        (queue,) = self._ask("opening a stream", self._cu.cuStreamCreate, flags, wanted=0)
        return int(queue)

    def close_queue(self, queue: int) -> None:
        """Give the stream up."""
        self._give_up("closing a stream", self._cu.cuStreamDestroy, queue)

    def copy_rows_in(self, target: int, source: int, rows: Rows, queue: int) -> None:
        """One copy on the stream; rows that follow each other are one."""
        source += rows.skip
        if rows.contiguous:
            call = self._cu.cuMemcpyHtoDAsync
            self._ask("copying to it", call, target, source, rows.total, queue)
        else:
            block = _block(self._cu, target, source, rows)
            self._ask("copying to it", self._cu.cuMemcpy2DAsync, block, queue)

    def wait(self, queue: int) -> None:
        """Wait for the stream; what failed on it is told here."""
        self._ask("copying to it", self._cu.cuStreamSynchronize, queue)

    def copy_out(self, address: int, nbytes: int) -> bytes:
        """A copy in pageable memory: for checks, not for speed."""
        data = bytearray(nbytes)
        self._ask("copying from it", self._cu.cuMemcpyDtoH, data, address, nbytes)
        return bytes(data)

    def copy_out_to(self, target: int, address: int, nbytes: int) -> None:
        """One copy into pinned memory, done when this returns."""
        self._ask("copying from it", self._cu.cuMemcpyDtoH, target, address, nbytes)

    def close(self) -> None:
        """Give the use of the context up; the last one ends it."""
        self._give_up("closing it", self._cu.cuDevicePrimaryCtxRelease, self._number)

    def _ask(
        self,
        doing: str,
        call: _Call,
        *arguments: object,
        wanted: int | None = None,
        room: Room | None = None,
        foreign: bool = False,
        opens: bool = False,
    ) -> tuple[Any, ...]:
        """The values that a call answers with; else what its status means.

        `wanted`, `room` and `foreign` are as of `meaning_of`, where the room is the device's unless
        another is given; `opens`: it may fail for want of a descriptor.
        """
        answer = _answer(doing, self._where, call, arguments)
        if status := answer[0]:
            if opens:
                require_descriptor(doing)
            words = f"{doing} failed{self._where}: {_words(self._cu, status)}"
            room = room or self.room
            raise meaning_of(status, words, room=room, wanted=wanted, foreign=foreign)
        return answer[1:]

    def _give_up(self, doing: str, call: _Call, *arguments: object) -> None:
        """Make a call that gives something up, or waits to do so.

        The driver ends before this process does, and gives everything up when it does.
        """
        status = _answer(doing, self._where, call, arguments)[0]
        if status and status != DEINITIALIZED:
            words = f"{doing} failed{self._where}: {_words(self._cu, status)}"
            raise meaning_of(status, words, room=self.room)


class _Current:
    """A block in which the driver's context is the thread's; one serves all threads.

    Within another such block there is nothing to do. That counts while many threads copy: each call
    of the driver lets go of the interpreter, and waits to have it back.
    """

    __slots__ = ("_depth", "_driver")

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._depth = threading.local()

    def __enter__(self) -> None:
        depth = getattr(self._depth, "blocks", 0)
        if not depth:
            self._driver.push()
        self._depth.blocks = depth + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth.blocks -= 1
        if not self._depth.blocks:
            self._driver.pop()


def _properties(cu: ModuleType, number: int, fd_type: object) -> object:
    """What an allocation is: on the device, and to be exported as a descriptor."""
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = number
    properties.requestedHandleTypes = fd_type
    return properties


def _access(cu: ModuleType, number: int, flags: object) -> list[object]:
    """Access of one device."""
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = number
    access.flags = flags
    return [access]


def _block(cu: ModuleType, target: int, source: int, rows: Rows) -> object:
    """A copy of rows that are apart in host memory, packed on the device."""
    copy = cu.CUDA_MEMCPY2D()
    copy.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost, copy.srcPitch = source, rows.stride
    copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.dstPitch = target, rows.nbytes
    copy.WidthInBytes, copy.Height = rows.nbytes, rows.count
    return copy
