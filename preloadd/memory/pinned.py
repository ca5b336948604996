"""Host memory for a device to copy from: large pages where the kernel has them, filled ahead.

A driver pins memory of ours faster than it allocates pinned memory of its own: pages are cleared by
several threads before the driver takes its lock, and there are 500 times fewer of them.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass

from preloadd.errors import OutOfRoom

LARGE_PAGE = 2 << 20

_MADV_POPULATE_WRITE = 23  # Linux 5.14; unknown to Python
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """Pinned memory: its bytes, and where they start. `area` is the mapping, if it is ours."""

    address: int
    view: memoryview
    area: mmap.mmap | None = None

    def release(self) -> None:
        """Give up what is ours.

        Views of it may live on in the frames of an error, which a BufferError must not hide. The
        memory goes with the last of them.
        """
        with suppress(BufferError):
            self.view.release()
            if self.area is not None:
                self.area.close()


def room() -> tuple[int, str]:
    """What to say of host memory that is refused: nothing tells how much would not be."""
    return 0, "the host's memory that may be pinned (`ulimit -l`, or the cgroup's memory limit)"


def allocate(nbytes: int) -> Pinned:
    """Memory that starts at a large page, all there; not pinned yet. OutOfRoom if there is none."""
    try:
        # Not shared, which is Python's own choice: the kernel has large pages for private memory.
        area = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        free, limit = room()
        raise OutOfRoom(wanted=nbytes, free=free, limit=limit, part=True) from error
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    skip = -base % LARGE_PAGE
    # A child that writes would get the pages, and this process copies that the device knows nothing
    # of.
    area.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without large pages
        area.madvise(mmap.MADV_HUGEPAGE)
    # By the C library itself, since Python's madvise keeps all other threads of Python waiting. An
    # older kernel refuses; then the pages come when they are pinned.
    _LIBC.madvise(ctypes.c_void_p(base + skip), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)
    with memoryview(area) as whole:
        return Pinned(base + skip, whole[skip : skip + nbytes], area)


def foreign(address: int, nbytes: int) -> Pinned:
    """Pinned memory that a driver allocated, and will free."""
    return Pinned(address, memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B"))
