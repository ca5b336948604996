"""HIP's runtime library by ctypes: the calls and layouts we use. Untested on hardware.

From HIP's public headers, hip/hip_runtime_api.h and hip/driver_types.h of ROCm 6 and 7: of the
structures only the members that were there from the first version with them are used, and numbers
of enumerations that are CUDA's as well.

What hipMemImportFromShareableHandle takes for a descriptor has changed: its address up to ROCm 7.0,
itself since 7.1 (github.com/ROCm/rocm-systems, pull request 759).
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path

from preloadd.errors import NoSuchDevice

LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
"""Names to look for. With PyTorch in this process, its own copy is found by one of the first."""

MEMORY_PINNED = 1  # hipMemAllocationTypePinned
HANDLE_FD = 1  # hipMemHandleTypePosixFileDescriptor
LOCATION_DEVICE = 1  # hipMemLocationTypeDevice
ACCESS_READ = 1  # hipMemAccessFlagsProtRead
ACCESS_READ_WRITE = 3  # hipMemAccessFlagsProtReadWrite
GRANULARITY_MINIMUM = 0  # hipMemAllocationGranularityMinimum
STREAM_NON_BLOCKING = 1  # hipStreamNonBlocking
HOST_TO_DEVICE = 1  # hipMemcpyHostToDevice

FDS_BY_VALUE = 70_100_000
"""From this version on, as hipRuntimeGetVersion tells it, a descriptor is imported by its value."""

_PROPERTIES = struct.Struct("@iiiiPBBH4x")
_ACCESS = struct.Struct("@iii")

UUID_BYTES = 16


def properties(number: int) -> bytes:
    """hipMemAllocationProp: type, requestedHandleType, location (type, id), win32HandleMetaData,
    and allocFlags (compressionType, gpuDirectRDMACapable, usage)."""
    return _PROPERTIES.pack(MEMORY_PINNED, HANDLE_FD, LOCATION_DEVICE, number, 0, 0, 0, 0)


def access(number: int, flags: int) -> bytes:
    """hipMemAccessDesc: location (type, id), flags."""
    return _ACCESS.pack(LOCATION_DEVICE, number, flags)


_CALLS: dict[str, tuple[object, ...]] = {
    "hipInit": (c_uint,),
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipGetDevice": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipDeviceGetUuid": (c_char_p, c_int),
    "hipDeviceGetName": (c_char_p, c_int, c_int),
    "hipDeviceTotalMem": (POINTER(c_size_t), c_int),
    "hipDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "hipDeviceSynchronize": (),
    "hipMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "hipMemGetAllocationGranularity": (POINTER(c_size_t), c_char_p, c_int),
    "hipMemCreate": (POINTER(c_void_p), c_size_t, c_char_p, c_ulonglong),
    "hipMemRelease": (c_void_p,),
    "hipMemExportToShareableHandle": (POINTER(c_int), c_void_p, c_int, c_ulonglong),
    "hipMemImportFromShareableHandle": (POINTER(c_void_p), c_void_p, c_int),
    "hipMemAddressReserve": (POINTER(c_void_p), c_size_t, c_size_t, c_void_p, c_ulonglong),
    "hipMemAddressFree": (c_void_p, c_size_t),
    "hipMemMap": (c_void_p, c_size_t, c_size_t, c_void_p, c_ulonglong),
    "hipMemUnmap": (c_void_p, c_size_t),
    "hipMemSetAccess": (c_void_p, c_size_t, c_char_p, c_size_t),
    "hipMemsetD32Async": (c_void_p, c_int, c_size_t, c_void_p),
    "hipHostRegister": (c_void_p, c_size_t, c_uint),
    "hipHostUnregister": (c_void_p,),
    "hipStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "hipStreamDestroy": (c_void_p,),
    "hipStreamSynchronize": (c_void_p,),
    "hipMemcpyHtoDAsync": (c_void_p, c_void_p, c_size_t, c_void_p),
    "hipMemcpy2DAsync": (
        *(c_void_p, c_size_t, c_void_p, c_size_t),
        *(c_size_t, c_size_t, c_int, c_void_p),
    ),
    "hipMemcpyDtoH": (c_void_p, c_void_p, c_size_t),
}


def load(library: Path | None = None) -> ctypes.CDLL:
    """The library at a path, or the one that the system has; NoSuchDevice if there is none."""
    name, hip = _first(LIBRARIES if library is None else (str(library),))
    try:
        for called, arguments in _CALLS.items():
            call = getattr(hip, called)
            call.argtypes, call.restype = arguments, c_int
        for called in ("hipGetErrorName", "hipGetErrorString"):
            call = getattr(hip, called)
            call.argtypes, call.restype = (c_int,), c_char_p
    except AttributeError as error:
        raise NoSuchDevice(
            f"{name} is too old to share memory of AMD GPUs ({error}): install ROCm 6.2 or newer"
        ) from error
    return hip


def _first(names: tuple[str, ...]) -> tuple[str, ctypes.CDLL]:
    for name in names:
        try:
            return name, ctypes.CDLL(name)
        except OSError:
            continue
    raise NoSuchDevice(
        f"the runtime of AMD GPUs is not to be found (looked for {', '.join(names)}): install ROCm"
    )
