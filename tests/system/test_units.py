"""The units themselves: understood by systemd, closed to the world, and what their sandbox does."""

from __future__ import annotations

import re

import pytest

from tests.system import installed
from tests.system.host import DRAFTED, Boot, Host, rank

SERVICES = [unit.name for unit in installed.UNITS if unit.suffix == ".service"]
INSTANCES = {"preloadd@.service": "CPU-0"}
UNKNOWN_BEFORE_254 = "Unknown key 'FileDescriptorStorePreserve' in section [Service], ignoring."
MAX_EXPOSURE = 2.0


def instance(unit: str) -> str:
    """A unit to look at, of a template or not."""
    name, at, end = unit.partition("@")
    return f"{name}@{INSTANCES.get(unit, 'a')}{end}" if at else unit


def test_systemd_understands_every_unit_and_drop_in(host: Host) -> None:
    host.write_group("a", ["CPU-0", "CPU-1"], more=f'{DRAFTED}\n[access]\ngroups = ["daemon"]')
    found = host.machine.run("ls", "/run/systemd/generator").stdout
    assert "preloadd@CPU-1.draft.service.d" in found
    units = [instance(unit.name) for unit in installed.UNITS]
    verified = host.machine.run("systemd-analyze", "verify", "--man=no", *units)
    told = (verified.stdout + verified.stderr).splitlines()
    if host.machine.version < 254:
        told = [line for line in told if not line.endswith(UNKNOWN_BEFORE_254)]
    assert told == []


def test_a_fault_in_a_unit_would_be_found(host: Host) -> None:
    text = host.machine.path("/usr/lib/systemd/system/preloadd@.service").read_text()
    host.machine.write("/run/systemd/system/x@.service", text.replace("Restart=", "Rastert="))
    verified = host.machine.run("systemd-analyze", "verify", "--man=no", "x@a.service", check=False)
    assert "Unknown key 'Rastert'" in re.sub(r"Unknown key name", "Unknown key", verified.stderr)


def test_no_service_is_more_exposed_than_it_must_be(host: Host) -> None:
    host.write_group("a", ["CPU-0"], more='[access]\ngroups = ["daemon"]')
    for unit in SERVICES:
        told = host.machine.run("systemd-analyze", "security", "--no-pager", instance(unit)).stdout
        (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", told)
        assert float(exposure) <= MAX_EXPOSURE, told


def test_all_that_was_installed_is_there(host: Host) -> None:
    passwd = host.machine.path("/etc/passwd").read_text()
    assert re.search(r"^preloadd:.*:/var/lib/preloadd:/usr/sbin/nologin$", passwd, re.MULTILINE)
    found = host.machine.path("/run/preloadd").stat()
    assert (found.st_mode & 0o7777, found.st_uid) == (0o755, 0)
    assert "disabled" in host.machine.systemctl("is-enabled", "preloadd.target", check=False).stdout
    preset = host.machine.systemctl("preset", "preloadd.target")
    assert "Created symlink" not in preset.stdout + preset.stderr


def test_it_comes_up_with_the_machine_once_it_is_enabled(boot: Boot) -> None:
    groups = {"/etc/preloadd/groups.d/a.toml": 'name = "a"\ngpus = ["CPU-0", "CPU-1"]\n'}
    enable = "systemctl enable preloadd.target"
    with boot(unit="multi-user.target", prepare=enable, files=groups) as host:
        assert host.states(["CPU-0", "CPU-1"]) == {"active"}
        assert host.state("preloadd.target") == "active"


@pytest.fixture
def shell(host: Host) -> Host:
    """A rank whose program is a shell script in /etc/script, in the same sandbox."""
    host.write_group("a", ["CPU-0"], more='[access]\ngroups = ["daemon"]')
    lines = ["[Service]", "Type=oneshot", "Restart=no", "WatchdogSec=0"]
    lines += ["ExecStart=", "ExecStart=/bin/sh -eux /etc/script", ""]
    dropin = "/run/systemd/system/preloadd@CPU-0.service.d/script.conf"
    host.machine.write(dropin, "\n".join(lines))
    host.machine.systemctl("daemon-reload")
    return host


def run(host: Host, script: str) -> list[str]:
    """What the script printed, line by line, its trace of commands included."""
    host.machine.write("/etc/script", script)
    done = host.machine.systemctl("start", rank("CPU-0"), check=False)
    told = host.machine.messages(rank("CPU-0"))
    assert done.returncode == 0, "\n".join(told)
    return told


def test_a_rank_writes_where_it_must_and_nowhere_else(shell: Host) -> None:
    run(
        shell,
        """
        for folder in $RUNTIME_DIRECTORY $STATE_DIRECTORY $CACHE_DIRECTORY $XDG_CACHE_HOME \\
            $PRELOADD_RENDEZVOUS /tmp /dev/shm ~; do touch $folder/file; done
        for folder in /run /run/preloadd /var/lib /etc /usr/lib /dev; do
          ! touch $folder/file || exit 1; done
        """,
    )
    for folder in ("/var/lib/preloadd", "/var/cache/preloadd"):
        assert shell.machine.path(folder).stat().st_mode & 0o7777 == 0o750


def test_a_rank_has_no_rights_but_its_groups(shell: Host) -> None:
    told = run(shell, "id -un; id -Gn; grep -E '^(Cap(Eff|Bnd)|NoNewPrivs)' /proc/self/status")
    assert "preloadd" in told
    assert "preloadd daemon" in told
    assert {"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"} <= set(told)


def test_a_rank_may_give_its_socket_to_a_group(shell: Host) -> None:
    run(shell, "umask 007; touch $RUNTIME_DIRECTORY/x; chgrp daemon $RUNTIME_DIRECTORY/x")


def test_a_rank_sees_what_it_reads_in_proc(shell: Host) -> None:
    run(shell, "grep MemAvailable /proc/meminfo; cat /proc/devices /proc/self/mountinfo >/dev/null")


def test_a_rank_opens_no_device_but_a_gpu(shell: Host) -> None:
    # Whether there is such a device does not matter: the answer then would be another one.
    shell.machine.run("mknod", "-m", "666", "/dev/other", "c", "203", "0")
    told = run(shell, "! head -c 1 /dev/other; head -c 1 /dev/urandom >/dev/null")
    assert any("Operation not permitted" in line for line in told)


def test_limits_of_a_rank(shell: Host) -> None:
    told = run(shell, "ulimit -Sn; ulimit -Hn; cat /proc/self/coredump_filter")
    assert told.count("8192") == 2
    assert "00000011" in told


def test_a_socket_of_a_group_stays_the_groups_over_restarts(host: Host) -> None:
    host.write_group("a", ["CPU-0"], more='[access]\ngroups = ["daemon"]')
    host.start()
    path = host.machine.path("/run/preloadd/CPU-0")
    before = (path / "socket").stat()
    for _ in range(2):
        host.machine.systemctl("restart", rank("CPU-0"))
    assert path.stat().st_mode & 0o7777 == 0o755
    assert (path / "socket").stat() == before
    assert before.st_mode & 0o7777 == 0o660
    assert before.st_gid != path.stat().st_gid


def test_a_folder_nobody_else_may_use_is_private(host: Host) -> None:
    host.write_group("a", ["CPU-0"])
    host.start()
    assert host.machine.path("/run/preloadd/CPU-0").stat().st_mode & 0o7777 == 0o700


def test_the_interpreter_of_the_tests_runs_preloadd_as_the_service_does(boot: Boot) -> None:
    with boot(program=installed.REAL) as host:
        command = ["setpriv", "--reuid=preloadd", "--regid=preloadd", "--clear-groups"]
        done = host.machine.run(*command, "/usr/libexec/preloadd/preloadd", "--version")
        assert done.stdout.startswith("preloadd ")
