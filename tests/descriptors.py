"""What a process has open."""

from __future__ import annotations

from pathlib import Path


def open_descriptors() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))
