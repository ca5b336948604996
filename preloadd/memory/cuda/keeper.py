"""Proves descriptors of GPU memory without CUDA. For the rank daemon, which has none."""

from __future__ import annotations

import os
import stat

from preloadd.errors import DamagedManifest

CONTROL = "/dev/nvidiactl"

# What the kernel's list of devices gives NVIDIA for it, where the node itself is hidden.
_CONTROL_NUMBER = os.makedev(195, 255)


class DeviceKeeper:
    """Implements `memory.api.Keeper`: chunks are open files of the driver's control node.

    How many bytes are behind one, and whether any are, only the driver can tell. There are no seals
    either: whoever imports a chunk chooses whether to write. Engines do not.
    """

    def __init__(self, node: str = CONTROL) -> None:
        self._node = node

    def seal(self, fd: int, nbytes: int) -> None:
        """The same as `verify`, since there is nothing to seal."""
        self.verify(fd, nbytes)

    def verify(self, fd: int, nbytes: int) -> None:
        """DamagedManifest unless `fd` is an open file of the node, and `nbytes` can be a size."""
        if nbytes <= 0:
            raise DamagedManifest(f"a chunk has {nbytes} bytes")
        found = os.fstat(fd)
        if not stat.S_ISCHR(found.st_mode) or found.st_rdev != self._number():
            raise DamagedManifest(f"a chunk came as something else than GPU memory ({self._node})")

    def _number(self) -> int:
        try:
            return os.stat(self._node).st_rdev  # noqa: PTH116 - one call, on a start that is timed
        except OSError:
            return _CONTROL_NUMBER
