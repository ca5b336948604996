"""HIP's virtual memory management for one device, as in `memory.cuda.driver`.

Untested on hardware: only against a library that stands in for the real one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path

from preloadd.domain.devices import AMD_VISIBLE
from preloadd.domain.ids import DeviceId
from preloadd.errors import DeviceFailed, NoSuchDevice
from preloadd.linux.fds import OwnedFd
from preloadd.memory import pinned
from preloadd.memory.api import Rows
from preloadd.memory.hip import binding as b
from preloadd.memory.pinned import Pinned
from preloadd.memory.status import DEINITIALIZED, HINT, Room, meaning_of, require_descriptor
from preloadd.memory.visible import hints


def open_device(
    device: DeviceId, environ: Mapping[str, str], library: Path | None = None
) -> HipDriver:
    """The device of this UUID; NoSuchDevice names those that are visible, and what hides others."""
    hip = initialised(library)
    seen = []
    for number in numbers(hip):
        found = identify(hip, number)
        if found == device:
            return HipDriver(hip, number, device)
        seen.append(found)
    told = f"only {', '.join(seen)}" if seen else "nor any other"
    hides = hints(AMD_VISIBLE, environ)
    hidden = f" ({hides})" if hides else ""
    raise NoSuchDevice(f"{device} is not to be seen here, {told}{hidden}")


def open_ordinal(number: int, library: Path | None = None) -> HipDriver:
    """The device that this process, and a framework in it, calls by this number; NoSuchDevice."""
    hip = initialised(library)
    if number not in numbers(hip):
        raise NoSuchDevice(
            f"there is no GPU {number} here, only {len(numbers(hip))}: they are counted from 0, "
            f"and {' or '.join(AMD_VISIBLE)} may hide some"
        )
    return HipDriver(hip, number, identify(hip, number))


def initialised(library: Path | None = None) -> ctypes.CDLL:
    """The runtime, ready for use; NoSuchDevice says what is missing."""
    hip = b.load(library)
    status = hip.hipInit(0)
    if status:
        raise NoSuchDevice(
            f"no AMD GPU can be used, {_words(hip, status)}: is the kernel's driver loaded, may "
            "this user open /dev/kfd and /dev/dri/render*, and does "
            f"{' or '.join(AMD_VISIBLE)} hide it?"
        )
    return hip


def numbers(hip: ctypes.CDLL) -> range:
    """How this process, and a framework in it, may call its devices."""
    count = c_int()
    require(hip, "counting the GPUs", hip.hipGetDeviceCount(byref(count)))
    return range(count.value)


def identify(hip: ctypes.CDLL, number: int) -> DeviceId:
    """The UUID of a device, as ROCR_VISIBLE_DEVICES and the driver's own tools write it."""
    uuid = ctypes.create_string_buffer(b.UUID_BYTES)
    require(hip, f"asking GPU {number} who it is", hip.hipDeviceGetUuid(uuid, number))
    raw = uuid.raw
    text = raw.rstrip(b"\0").decode("ascii", errors="replace")
    # The runtime hands out the text itself, 16 hexadecimal digits, where CUDA has a number.
    return DeviceId("GPU-" + (text if text.isalnum() and text.isascii() else raw.hex()))


def name_of(hip: ctypes.CDLL, number: int) -> str:
    """What the maker calls the device."""
    name = ctypes.create_string_buffer(128)
    require(hip, f"asking GPU {number} its name", hip.hipDeviceGetName(name, 128, number))
    return name.value.decode(errors="replace")


def require(hip: ctypes.CDLL, doing: str, status: int) -> None:
    """DeviceFailed if a call without a device failed."""
    if status:
        raise DeviceFailed(f"{doing} failed: {_words(hip, status)}: {HINT}")


def _words(hip: ctypes.CDLL, status: int) -> str:
    name, text = hip.hipGetErrorName(status), hip.hipGetErrorString(status)
    return f"{(name or b'status %d' % status).decode()} ({(text or b'unknown').decode()})"


class HipDriver:
    """One device of this process. Implements `memory.vmm.Driver`."""

    def __init__(self, hip: ctypes.CDLL, number: int, device: DeviceId) -> None:
        """NoSuchDevice if its memory cannot be shared."""
        self._hip, self._number, self._device = hip, number, device
        self._name = name_of(hip, number)
        self._fds_by_value = version(hip) >= b.FDS_BY_VALUE
        self._properties = b.properties(number)
        self._granularity = granularity(hip, number)
        if not self._granularity:
            raise NoSuchDevice(
                f"{device} ({self._name}) or its driver does not support virtual memory "
                "management: update ROCm, or use host memory (memory = host)"
            )

    @property
    def device(self) -> DeviceId:
        """The UUID of the GPU."""
        return self._device

    @property
    def granularity(self) -> int:
        """The least the driver allows."""
        return self._granularity

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device, for this thread and the length of a block."""
        before = c_int()
        self._given_up("asking for the device", self._hip.hipGetDevice(byref(before)))
        self._given_up("using it", self._hip.hipSetDevice(self._number))
        try:
            yield
        finally:
            self._hip.hipSetDevice(before)

    def room(self) -> tuple[int, str]:
        """Bytes free now, of which device."""
        return self.available(), f"{self._device} ({self._name})"

    def available(self) -> int:
        """Bytes free now."""
        free, total = c_size_t(), c_size_t()
        self._done("asking for free memory", self._hip.hipMemGetInfo(byref(free), byref(total)))
        return free.value

    def create(self, nbytes: int) -> int:
        """Allocate memory that can be exported."""
        handle = c_void_p()
        status = self._hip.hipMemCreate(byref(handle), nbytes, self._properties, 0)
        self._done(f"allocating {nbytes:,} bytes", status, wanted=nbytes, opens=True)
        return handle.value or 0

    def export(self, handle: int) -> OwnedFd:
        """A close-on-exec descriptor; OutOfDescriptors where the process has none left."""
        fd = c_int(-1)
        status = self._hip.hipMemExportToShareableHandle(byref(fd), handle, b.HANDLE_FD, 0)
        self._done("exporting a chunk", status, opens=True)
        owned = OwnedFd(fd.value)
        os.set_inheritable(owned.fileno(), False)  # noqa: FBT003 - the name says it
        return owned

    def import_fd(self, fd: int) -> int:
        """A handle of an exported chunk; DamagedManifest if the driver knows no such memory."""
        handle, theirs = c_void_p(), c_int(fd)
        given = fd if self._fds_by_value else byref(theirs)
        status = self._hip.hipMemImportFromShareableHandle(byref(handle), given, b.HANDLE_FD)
        self._done("importing a chunk", status, wanted=0, foreign=True, opens=True)
        return handle.value or 0

    def require_home(self, handle: int) -> None:
        """Nothing: HIP says of all that is imported that it is the current device's."""

    def release(self, handle: int) -> None:
        """Give the handle up."""
        self._given_up("releasing a chunk", self._hip.hipMemRelease(handle))

    def reserve(self, nbytes: int, *, foreign: bool = False) -> int:
        """Addresses without memory, where the driver likes."""
        address, doing = c_void_p(), f"reserving {nbytes:,} bytes of addresses"
        status = self._hip.hipMemAddressReserve(byref(address), nbytes, 0, None, 0)
        self._done(doing, status, wanted=0, foreign=foreign)
        return address.value or 0

    def free(self, address: int, nbytes: int) -> None:
        """Give a whole reservation up."""
        self._given_up("giving addresses up", self._hip.hipMemAddressFree(address, nbytes))

    def map(self, address: int, nbytes: int, handle: int, *, foreign: bool = False) -> None:
        """Map from the start of a chunk; DamagedManifest if a foreign one has fewer bytes."""
        status = self._hip.hipMemMap(address, nbytes, 0, handle, 0)
        self._done(f"mapping a chunk as {nbytes} bytes", status, wanted=0, foreign=foreign)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take back one `map`."""
        self._given_up("unmapping a chunk", self._hip.hipMemUnmap(address, nbytes))

    def allow(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Access for this device alone."""
        flags = b.ACCESS_READ_WRITE if writable else b.ACCESS_READ
        access = b.access(self._number, flags)
        status = self._hip.hipMemSetAccess(address, nbytes, access, 1)
        self._done("setting access", status, wanted=0)

    def clear(self, address: int, nbytes: int) -> None:
        """Zeros, all there when this returns, whatever queue writes next."""
        status = self._hip.hipMemsetD32Async(address, 0, nbytes // 4, None)
        self._done("clearing a chunk", status, wanted=0)
        self.wait(0)

    def synchronize(self) -> None:
        """Wait for everything that was asked of the device."""
        self._given_up("waiting for its work", self._hip.hipDeviceSynchronize())

    def pin(self, nbytes: int) -> Pinned:
        """Large pages of ours, registered."""
        memory = pinned.allocate(nbytes)
        status = self._hip.hipHostRegister(memory.address, nbytes, 0)
        if status:
            memory.release()
        doing = f"pinning {nbytes:,} bytes of host memory"
        self._done(doing, status, wanted=nbytes, room=pinned.room)
        return memory

    def unpin(self, memory: Pinned) -> None:
        """Undo `pin`."""
        status = self._hip.hipHostUnregister(memory.address)
        memory.release()
        self._given_up("unpinning host memory", status)

    def open_queue(self) -> int:
        """A stream that does not wait for the default one."""
        queue = c_void_p()
        status = self._hip.hipStreamCreateWithFlags(byref(queue), b.STREAM_NON_BLOCKING)
        self._done("opening a stream", status, wanted=0)
        return queue.value or 0

    def close_queue(self, queue: int) -> None:
        """Give the stream up."""
        self._given_up("closing a stream", self._hip.hipStreamDestroy(queue))

    def copy_rows_in(self, target: int, source: int, rows: Rows, queue: int) -> None:
        """One copy on the stream; rows that follow each other are one."""
        source += rows.skip
        if rows.contiguous:
            status = self._hip.hipMemcpyHtoDAsync(target, source, rows.total, queue)
        else:
            shape = (rows.nbytes, rows.count, b.HOST_TO_DEVICE)
            pitches = (target, rows.nbytes, source, rows.stride)
            status = self._hip.hipMemcpy2DAsync(*pitches, *shape, queue)
        self._done("copying to it", status)

    def wait(self, queue: int) -> None:
        """Wait for the stream; what failed on it is told here."""
        self._done("copying to it", self._hip.hipStreamSynchronize(queue or None))

    def copy_out(self, address: int, nbytes: int) -> bytes:
        """A copy in pageable memory: for checks, not for speed."""
        data = ctypes.create_string_buffer(nbytes)
        self._done("copying from it", self._hip.hipMemcpyDtoH(data, address, nbytes))
        return data.raw

    def copy_out_to(self, target: int, address: int, nbytes: int) -> None:
        """One copy into pinned memory, done when this returns."""
        self._done("copying from it", self._hip.hipMemcpyDtoH(target, address, nbytes))

    def close(self) -> None:
        """Nothing: the runtime keeps its context while the process lives."""

    def _done(
        self,
        doing: str,
        status: int,
        *,
        wanted: int | None = None,
        room: Room | None = None,
        foreign: bool = False,
        opens: bool = False,
    ) -> None:
        """Raise what a status means, as in `memory.cuda.driver`."""
        if status:
            if opens:
                require_descriptor(doing)
            words = f"{doing} failed on {self._device} ({self._name}): {_words(self._hip, status)}"
            room = room or self.room
            raise meaning_of(status, words, room=room, wanted=wanted, foreign=foreign)

    def _given_up(self, doing: str, status: int) -> None:
        """As `_done`, of what is no failure after the driver's own end."""
        self._done(doing, 0 if status == DEINITIALIZED else status)


def version(hip: ctypes.CDLL) -> int:
    """The runtime's version: 7.1.25424 is 70125424."""
    found = c_int()
    require(hip, "asking HIP its version", hip.hipRuntimeGetVersion(byref(found)))
    return found.value


def granularity(hip: ctypes.CDLL, number: int) -> int:
    """What allocations are multiples of; 0 if memory of the device cannot be shared."""
    unit, properties = c_size_t(), b.properties(number)
    # There is an attribute for it, but its number depends on the version of HIP.
    status = hip.hipMemGetAllocationGranularity(byref(unit), properties, b.GRANULARITY_MINIMUM)
    return 0 if status else unit.value
