"""What is renewed under running ranks of the demo model, and what a stop gives back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import preloadd
from tests.system import demo
from tests.system.demo import A, B
from tests.system.host import Boot, Host, group, rank

ALL = (*A, *B)
UNIT = "/usr/lib/systemd/system/preloadd@.service"
CODE = "/usr/lib/preloadd/preloadd"


@pytest.fixture(scope="module")
def host(boot: Boot) -> Iterator[Host]:
    """A machine that was booted with both groups."""
    with demo.booted(boot, more="restart.burst = 1000") as host:
        yield host


@pytest.fixture
def serving(host: Host) -> Host:
    """The same, with both groups up."""
    host.start()
    return host


def generations(host: Host) -> list[str]:
    return [generation for _, generation in host.lives(ALL)]


def assert_adopted(
    host: Host, before: list[tuple[int, str]], instances: tuple[str, ...] = ALL
) -> None:
    """Every rank is another process that has the weights of `before`, and has read nothing."""
    after = host.lives(instances)
    assert [generation for _, generation in after] == [generation for _, generation in before]
    assert not {pid for pid, _ in after} & {pid for pid, _ in before}
    for instance in instances:
        told = host.told_by(instance)
        assert told.adopted
        assert (told.counters["loads"], told.counters["bytes_read"]) == (0, 0)


@pytest.mark.parametrize("what", ["daemon-reload", "daemon-reexec"])
def test_the_manager_is_renewed_and_nothing_happens(serving: Host, what: str) -> None:
    before = serving.lives(ALL)
    stored = {instance: serving.stored(instance) for instance in ALL}
    serving.machine.systemctl(what)
    assert serving.lives(ALL) == before
    assert {instance: serving.stored(instance) for instance in ALL} == stored


def test_a_restart_of_one_group_adopts_and_leaves_the_other(serving: Host) -> None:
    before, others = serving.lives(A), serving.lives(B)
    serving.machine.systemctl("restart", group("a"))
    assert_adopted(serving, before, A)
    assert serving.lives(B) == others


def test_a_restart_after_the_manager_was_renewed_adopts(serving: Host) -> None:
    before = serving.lives(ALL)
    serving.machine.systemctl("daemon-reexec")
    serving.machine.systemctl("restart", "preloadd.target")
    assert_adopted(serving, before)


def test_an_upgrade_of_units_adopts(serving: Host) -> None:
    before = serving.lives(ALL)
    text = serving.machine.path(UNIT).read_text()
    changed = text.replace("preloadd rank %i", "preloadd rank %i, next", 1)
    changed = changed.replace("TimeoutStopSec=10", "TimeoutStopSec=9")
    serving.machine.write(UNIT, changed)
    try:
        serving.machine.systemctl("daemon-reload")
        assert serving.lives(ALL) == before
        serving.machine.systemctl("restart", "preloadd.target")
        assert serving.machine.show(rank(A[0]), "TimeoutStopUSec") == "9s"
        assert serving.machine.show(rank(A[0]), "Description").endswith("next")
        assert_adopted(serving, before)
    finally:
        serving.machine.write(UNIT, text)
        serving.machine.systemctl("daemon-reload")


def test_files_are_judged_only_where_they_have_changed(serving: Host) -> None:
    path = serving.machine.path("/etc/preloadd/groups.d/a.toml")
    text = path.read_text()

    def restarted() -> bool:
        """Whether a rank that comes back has loaded what judges files."""
        before = serving.lives(A)
        serving.machine.systemctl("restart", group("a"))
        assert_adopted(serving, before, A)
        maps = serving.machine.run("cat", f"/proc/{serving.pid(A[0])}/maps").stdout
        return "pydantic" in maps

    restarted()
    assert not restarted()
    try:
        path.write_text(f"# changed\n{text}")
        assert restarted()
        assert not restarted()
    finally:
        path.write_text(text)


def test_an_upgrade_of_the_code_adopts(serving: Host) -> None:
    before = serving.lives(ALL)
    install(serving, "9.9.9")
    told = serving.ctl("version").stdout
    assert re.findall(r"\d+\.\d+\.\d+\S*", told) == ["9.9.9", *[preloadd.__version__] * len(ALL)]
    assert "`preloadctl restart a b`" in told
    assert serving.lives(ALL) == before
    serving.machine.systemctl("restart", "preloadd.target")
    assert_adopted(serving, before)
    assert {serving.told_by(instance).version for instance in ALL} == {"9.9.9"}
    assert "preloadctl restart" not in serving.ctl("version").stdout
    install(serving, preloadd.__version__)
    serving.machine.systemctl("restart", "preloadd.target")


def install(host: Host, version: str) -> None:
    """Put the files of another version in the place of those that are installed, as packages do."""
    script = f"""
    cp -a {CODE} {CODE}.new
    sed -i 's/^__version__ = .*/__version__ = "{version}"/' {CODE}.new/__init__.py
    if mountpoint -q {CODE}; then umount -l {CODE}; fi
    rm -rf {CODE}.old && mv {CODE} {CODE}.old && mv {CODE}.new {CODE}
    """
    host.machine.run("sh", "-euc", script)


def test_a_stop_frees_the_memory_and_a_start_loads(serving: Host) -> None:
    before = generations(serving)
    files = weight_files(serving)
    nbytes = sum(serving.told_by(instance).arena_bytes for instance in ALL)
    assert len(files) >= len(ALL)
    shared = shmem()
    serving.machine.systemctl("stop", "preloadd.target", "preloadd@*.service")
    assert {serving.stored(instance) for instance in ALL} == {0}
    assert not files & weight_files(serving)
    # Others on this machine have shared memory, too.
    serving.until(lambda: shared - shmem() > nbytes / 2, "memory that was given back")
    print(f"{(shared - shmem()) / 2**20:.0f} of {nbytes / 2**20:.0f} MiB given back")
    serving.start()
    assert not set(before) & set(generations(serving))
    for instance in ALL:
        told = serving.told_by(instance)
        assert not told.adopted
        assert told.counters["loads"] == 1
        assert told.counters["bytes_read"] > 0


def weight_files(host: Host) -> set[int]:
    """The memory files of weights that any process of the machine has open or mapped, as inodes."""
    namespace = Path(f"/proc/{host.machine.pid}/ns/pid").readlink()
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns/pid").readlink() != namespace:
                continue
            maps = (process / "maps").read_text()
            found |= {int(n) for n in re.findall(r" (\d+) +/memfd:preloadd-chunk", maps)}
            for fd in (process / "fd").iterdir():
                if fd.readlink().name.startswith("memfd:preloadd-chunk"):
                    found.add(fd.stat().st_ino)
        except (FileNotFoundError, PermissionError):  # it has ended, or is none of ours
            continue
    return found


def shmem() -> int:
    """Bytes of shared memory in use on this machine and all in it."""
    (found,) = re.findall(r"^Shmem:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found) * 1024
