from __future__ import annotations

import os
from pathlib import Path

import pytest

from preloadd.linux.room import room

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


class Host:
    """A made-up /proc and /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def memory(self, available: int) -> None:
        self.write("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\nX: 1")

    def version2(self, cgroup: str, *, mounted: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{cgroup}")
        mount = f"30 20 0:26 {mounted} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw"
        self.write("proc/self/mountinfo", f"20 1 8:1 / / rw - ext4 /dev/sda rw\n{mount}")

    def version1(self, cgroup: str, *, mounted: str = "/") -> None:
        self.write("proc/self/cgroup", f"9:name=systemd:/\n4:cpu,memory:{cgroup}\n0::/")
        start = f"0:26 {mounted} /sys/fs/cgroup"
        self.write(
            "proc/self/mountinfo",
            f"30 20 {start}/blkio rw - cgroup cgroup rw,blkio\n"
            f"31 20 {start}/memory rw - cgroup cgroup rw,cpu,memory",
        )

    def limit2(self, folder: str, limit: object, used: int, **stat: int) -> None:
        self.write(f"sys/fs/cgroup{folder}/memory.max", limit)
        self._use(f"sys/fs/cgroup{folder}", "memory.current", used, stat)

    def limit1(self, folder: str, limit: int, used: int, **stat: int) -> None:
        self.write(f"sys/fs/cgroup/memory{folder}/memory.limit_in_bytes", limit)
        self._use(f"sys/fs/cgroup/memory{folder}", "memory.usage_in_bytes", used, stat)

    def _use(self, folder: str, name: str, used: int, stat: dict[str, int]) -> None:
        self.write(f"{folder}/{name}", used)
        self.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    host.memory(10 * GIB)
    return host


def test_without_cgroups_the_kernel_decides(host: Host) -> None:
    assert room(host.root) == (10 * GIB, "MemAvailable")


def test_the_smallest_ancestor_bounds(host: Host) -> None:
    host.version2("/a.slice/b.service")
    host.limit2("/a.slice/b.service", "max", 5)
    host.limit2("/a.slice", 4 * GIB, GIB)
    assert room(host.root) == (3 * GIB, "the cgroup limit /sys/fs/cgroup/a.slice/memory.max")


def test_memory_bounds_when_the_cgroup_allows_more(host: Host) -> None:
    host.version2("/a")
    host.limit2("/a", 40 * GIB, GIB)
    assert room(host.root) == (10 * GIB, "MemAvailable")


def test_file_pages_do_not_count_as_used(host: Host) -> None:
    host.version2("/a")
    # Memory files are in `file` and `shmem`, and on the lists of anonymous pages.
    host.limit2(
        "/a", 4 * GIB, 3 * GIB, file=9, shmem=9, inactive_anon=9, inactive_file=GIB, active_file=5
    )
    assert room(host.root)[0] == 2 * GIB + 5


def test_memory_high_bounds_too(host: Host) -> None:
    host.version2("/a")
    host.limit2("/a", 4 * GIB, GIB)
    host.write("sys/fs/cgroup/a/memory.high", 2 * GIB)
    assert room(host.root) == (GIB, "the cgroup limit /sys/fs/cgroup/a/memory.high")


def test_an_exceeded_limit_leaves_nothing(host: Host) -> None:
    host.version2("/a")
    host.limit2("/a", GIB, 2 * GIB)
    assert room(host.root)[0] == 0


def test_version_1_and_its_ancestors(host: Host) -> None:
    host.version1("/docker/x")
    host.limit1("/docker/x", V1_UNLIMITED, 0)
    host.limit1("/docker", 4 * GIB, 3 * GIB, inactive_file=7, total_inactive_file=GIB)
    assert room(host.root) == (
        2 * GIB,
        "the cgroup limit /sys/fs/cgroup/memory/docker/memory.limit_in_bytes",
    )


def test_a_mount_that_begins_at_the_container(host: Host) -> None:
    host.version1("/docker/x/inner", mounted="/docker/x")
    host.limit1("/inner", V1_UNLIMITED, 0)
    host.limit1("", 4 * GIB, GIB)
    assert room(host.root)[0] == 3 * GIB


@pytest.mark.parametrize("cgroup", ["/../outside", "/elsewhere"])
def test_a_cgroup_outside_of_what_is_mounted(host: Host, cgroup: str) -> None:
    host.version2(cgroup, mounted="/docker/x")
    host.limit2("", 4 * GIB, GIB)
    assert room(host.root)[0] == 3 * GIB


def test_nonsense_bounds_nothing(host: Host) -> None:
    host.version2("/a")
    host.limit2("/a", "lots", GIB)
    assert room(host.root) == (10 * GIB, "MemAvailable")


def test_a_cgroup_without_statistics_counts_all_as_used(host: Host) -> None:
    host.version2("/a")
    host.limit2("/a", 4 * GIB, 3 * GIB)
    (host.root / "sys/fs/cgroup/a/memory.stat").write_text("not a statistic\n")
    assert room(host.root)[0] == GIB


def test_hidden_memory_information_falls_back_to_all_there_is(tmp_path: Path) -> None:
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert room(tmp_path) == (everything, "physical memory")


def test_this_host_has_some() -> None:
    nbytes, bound = room()
    assert 0 < nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert bound == "MemAvailable" or bound.startswith("the cgroup limit /")
