"""What the page cache holds of a file."""

from __future__ import annotations

import ctypes
import os

_CACHESTAT = 451
"""The number of the call on every architecture but Alpha (include/uapi/asm-generic/unistd.h)."""

_LIBC = ctypes.CDLL(None)


def holds(fd: int, place: int) -> bool | None:
    """Whether the page cache has the byte at `place`; None where the kernel does not tell."""
    found = counted(fd, place)
    return looked_up(fd, place) if found is None else found


def counted(fd: int, place: int) -> bool | None:
    """As `holds`, by cachestat(2): Linux 6.5 and newer, of a file that this user might write.

    It takes an offset and a length in bytes, and counts pages: first of all those that are cached.
    """
    where = (ctypes.c_uint64 * 2)(place, 1)
    pages = (ctypes.c_uint64 * 5)()
    if _LIBC.syscall(_CACHESTAT, fd, where, pages, 0):
        return None
    return pages[0] != 0


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
