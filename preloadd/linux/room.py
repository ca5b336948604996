"""How much memory can still be filled: what the kernel has, and what the cgroups allow.

Said before loading, since a limit met while loading is not an error but the OOM killer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class _Version(NamedTuple):
    """File names of one version of the memory controller."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_V1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
# Above memory.high a process is slowed down until it hardly moves.
_V2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def room(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes of memory that can still be allocated, and what bounds them, for the error text.

    What cannot be read bounds nothing. `root` is where /proc and /sys are found.
    """
    bounds = [_available(root), *_cgroup_bounds(root)]
    return min(bounds, key=lambda bound: bound[0])


def _available(root: Path) -> tuple[int, str]:
    with suppress(OSError):
        text = (root / "proc/meminfo").read_text()
        if found := re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE):
            return int(found[1]) * 1024, "MemAvailable"
    # Hidden in some sandboxes (ProcSubset=pid). Free memory would not count the page cache, so the
    # whole of it is the only bound that never refuses wrongly.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "physical memory"


def _cgroup_bounds(root: Path) -> Iterator[tuple[int, str]]:
    for folder, top, version in _memory_cgroups(root):
        for path in (folder, *folder.parents):
            yield from _folder_bounds(root, path, version)
            if path == top:
                break


def _folder_bounds(root: Path, path: PurePosixPath, version: _Version) -> Iterator[tuple[int, str]]:
    folder = root / path.relative_to("/")
    for name in version.limits:
        # Absent in the top folder. Where nothing is set, version 2 says "max" and version 1 the
        # largest multiple of the page size.
        with suppress(OSError, ValueError):
            limit = int((folder / name).read_text())
            used = int((folder / version.usage).read_text()) - _cache(folder, version)
            yield max(0, limit - used), f"the cgroup limit {path / name}"


def _cache(folder: Path, version: _Version) -> int:
    """Bytes charged for file pages, which the kernel takes back before it kills anybody.

    Memory files are on the lists of anonymous pages, so they are not among these.
    """
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text().splitlines()
        numbers = {name: int(value) for name, value in (line.split() for line in lines)}
        return sum(numbers.get(name, 0) for name in version.cache)
    return 0


def _memory_cgroups(
    root: Path,
) -> Iterator[tuple[PurePosixPath, PurePosixPath, _Version]]:
    """The folder of this process's cgroup, the top folder of its hierarchy, and its version."""
    with suppress(OSError):
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        for number, controllers, cgroup in (line.split(":", 2) for line in memberships):
            if number == "0":
                yield from _locate(mounts, cgroup, "cgroup2", "", _V2)
            elif "memory" in controllers.split(","):
                yield from _locate(mounts, cgroup, "cgroup", "memory", _V1)


def _locate(
    mounts: list[str], cgroup: str, kind: str, controller: str, version: _Version
) -> Iterator[tuple[PurePosixPath, PurePosixPath, _Version]]:
    for line in mounts:
        before, _, after = line.partition(" - ")
        mounted_root, mount_point = map(PurePosixPath, before.split()[3:5])
        found_kind, _, options = after.split(maxsplit=2)
        if found_kind == kind and (not controller or controller in options.split(",")):
            # In a container the mount may begin inside the hierarchy, at this cgroup or above it.
            inside = PurePosixPath(cgroup)
            below = (
                inside.relative_to(mounted_root)
                if inside.is_relative_to(mounted_root)
                else PurePosixPath()
            )
            yield mount_point / below, mount_point, version
            return
