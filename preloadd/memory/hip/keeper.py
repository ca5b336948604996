"""Proves descriptors of GPU memory without HIP. For the rank daemon. Untested on hardware."""

from __future__ import annotations

import os
from pathlib import Path

from preloadd.errors import DamagedManifest

# How the kernel calls open dma-bufs: since 5.3 by a file system of their own, before as all files
# without one.
_NAMES = ("/dmabuf:", "anon_inode:dmabuf")


class DmaBufKeeper:
    """Implements `memory.api.Keeper`: HIP exports chunks as dma-bufs, which tell their size.

    There are no seals: whoever imports a chunk chooses whether to write. Engines do not.
    """

    def seal(self, fd: int, nbytes: int) -> None:
        """The same as `verify`, since there is nothing to seal."""
        self.verify(fd, nbytes)

    def verify(self, fd: int, nbytes: int) -> None:
        """DamagedManifest unless `fd` is a dma-buf of `nbytes`."""
        if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(_NAMES):
            raise DamagedManifest("a chunk came as something else than GPU memory (a dma-buf)")
        found = os.lseek(fd, 0, os.SEEK_END)
        if found != nbytes or nbytes <= 0:
            raise DamagedManifest(f"a chunk has {found} bytes instead of {nbytes}")
