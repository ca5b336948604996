"""The identity of a file as the kernel tells it, without reading the file."""

from __future__ import annotations

import os
from pathlib import Path

from preloadd.domain.files import FileIdentity


def identify(file: Path | int) -> FileIdentity:
    """The identity of the file at a path (links are followed) or behind a borrowed descriptor.

    OSError passes through: only the caller knows what the file was for.
    """
    seen = os.stat(file)  # noqa: PTH116 - takes descriptors too
    return FileIdentity(seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
