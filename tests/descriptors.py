"""What a process has open."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def open_descriptors() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def targets(pid: int | str = "self") -> dict[str, str]:
    """What each descriptor of a process refers to, by its number. One that is closed while this
    looks is left out, so that of this listing itself."""
    found = {}
    for path in list(Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):
            found[path.name] = str(path.readlink())
    return found
