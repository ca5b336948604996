"""What the page cache holds of a file."""

from __future__ import annotations

import ctypes
import os

_CACHESTAT = 451
"""The number of the call on every architecture but Alpha (include/uapi/asm-generic/unistd.h)."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]


class _Pages(ctypes.Structure):
    _fields_ = [
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    ]


def holds(fd: int, place: int) -> bool | None:
    """Whether the page cache has the byte at `place`; None where the kernel does not tell."""
    found = counted(fd, place)
    return looked_up(fd, place) if found is None else found


def counted(fd: int, place: int) -> bool | None:
    """As `holds`, by cachestat(2): Linux 6.5 and newer, of a file that this user might write."""
    pages = _Pages()
    wanted = _Range(place, 1)
    if _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(pages), 0):
        return None
    return pages.cached > 0


def looked_up(fd: int, place: int) -> bool | None:
    """As `holds`, by a read that does not wait.

    It makes the kernel begin to read what it does not hold: where the disk is so quick, as that of
    a virtual machine may be, that this is over at once, all seems to be held.
    """
    try:
        os.preadv(fd, [bytearray(1)], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        # EOPNOTSUPP of this file system. If the disk is ill, the read will say so.
        return None
    return True
