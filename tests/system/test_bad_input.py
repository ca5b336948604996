"""What an administrator may get wrong: it is said clearly, and touches nothing that runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.system import installed
from tests.system.host import HEALTH, Boot, Host, rank

A = ("CPU-0", "CPU-1")
B = ("CPU-2",)
ALL = (*A, *B)
NUMBERS = count(3)
GROUPS = "/etc/preloadd/groups.d"
SUPERVISOR = "preloadd-supervisor.service"
TIMED_OUT = 28
"""What curl ends with when nobody answers it."""
WRONG = 78
"""Exit status for a configuration that cannot be used."""


@pytest.fixture(scope="module")
def host(boot_once: Boot, tiny: Path) -> Iterator[Host]:
    """A machine with two groups that serve, and go on through all of the tests."""
    with boot_once(program=installed.REAL, binds=[(tiny, "/srv/model")]) as host:
        host.write_real_group("a", A)
        host.write_real_group("b", B)
        host.start()
        yield host


@pytest.fixture(autouse=True)
def lives(host: Host) -> Iterator[dict[str, tuple[int, str]]]:
    """Every rank's process and weights; whatever a test does, both are still there afterwards."""
    before = dict(zip(ALL, host.lives(ALL), strict=True))
    yield before
    assert dict(zip(ALL, host.lives(ALL), strict=True)) == before
    assert {host.told_by(instance).state for instance in ALL} == {"serving"}


@pytest.fixture
def spare(host: Host) -> Iterator[str]:
    """The device of a group that cannot work: one that has never been used."""
    device = f"CPU-{next(NUMBERS)}"
    yield device
    host.machine.systemctl("stop", rank(device))
    host.machine.systemctl("reset-failed")


@contextmanager
def changed(host: Host, name: str, text: str) -> Iterator[None]:
    """A file of a group as long as the block lasts, known to systemd."""
    path = host.machine.path(f"{GROUPS}/{name}.toml")
    before = path.read_text() if path.exists() else None
    host.machine.write(f"{GROUPS}/{name}.toml", text)
    host.machine.systemctl("daemon-reload")
    try:
        yield
    finally:
        path.unlink() if before is None else path.write_text(before)
        host.machine.systemctl("daemon-reload")


def checked(host: Host) -> str:
    """What `preloadctl config check` complains of."""
    done = host.ctl("config", "check")
    assert done.returncode == WRONG, done
    return done.stderr


def started(host: Host, name: str) -> subprocess.CompletedProcess[str]:
    """What comes of a start of a group that cannot work."""
    done = host.ctl("start", name)
    assert done.returncode != 0, done
    return done


def definition(gpus: str, more: str = 'model = "/srv/model"') -> str:
    return f"gpus = {gpus}\n{more}\nrestart.burst = 2\n"


def test_broken_toml_is_told_with_its_line(host: Host) -> None:
    with changed(host, "a", 'gpus = ["CPU-0",\nmodel = '):
        told = checked(host)
        assert f"{GROUPS}/a.toml: line 2" in told
        assert "correct the TOML" in told
        refused = host.ctl("config", "apply")
        assert refused.returncode == WRONG
        assert "a.toml" in refused.stderr


def test_a_rank_that_ends_while_its_file_is_broken_comes_back_with_its_weights(
    host: Host, lives: dict[str, tuple[int, str]]
) -> None:
    with changed(host, "b", "gpus = "):
        old = host.pids(B)
        host.kill(B[0])
        host.until_back(B, old)
        told = "\n".join(host.machine.messages(rank(B[0])))
        assert "going on with the settings of before" in told
    lives[B[0]] = (host.pid(B[0]), lives[B[0]][1])


def test_a_device_of_two_groups_is_told_with_both_files(host: Host) -> None:
    with changed(host, "c", definition('["CPU-0"]')):
        told = checked(host)
        assert f"{GROUPS}/c.toml: gpus: CPU-0 is given to the group of {GROUPS}/a.toml" in told
        # Of two claims the earlier file's holds.
        assert "there is no group c here" in started(host, "c").stderr


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("GPU-53b1d48b-de77-970d-5f91-576155feee6c", "is not seen by a loader"),
        ("GPU-53b1", "config apply"),
        ("0", "numbers of GPUs change"),
        ("TPU-0", "TPU-0"),
    ],
)
def test_an_unknown_device_is_told(host: Host, device: str, said: str) -> None:
    with changed(host, "c", definition(json.dumps([device]))):
        told = checked(host)
        assert f"{GROUPS}/c.toml: gpus" in told
        assert device in told
        assert said in told


def test_a_missing_interpreter_is_told(host: Host, spare: str) -> None:
    more = 'model = "/srv/model"\npython = "/opt/missing/bin/python"'
    with changed(host, "c", definition(f'["{spare}"]', more)):
        assert "/opt/missing/bin/python: no executable file" in checked(host)
        assert "/opt/missing/bin/python" in started(host, "c").stderr
        journal = host.machine.messages(rank(spare))
        assert any("/opt/missing/bin/python" in text for text in journal)


def test_a_model_that_the_service_cannot_read_is_told(host: Host, spare: str) -> None:
    host.machine.run("sh", "-c", "mkdir -p /srv/closed && cp -r /srv/model /srv/closed/model")
    host.machine.run("chmod", "700", "/srv/closed")
    with changed(host, "c", definition(f'["{spare}"]', 'model = "/srv/closed/model"')):
        told = checked(host)
        assert "c.toml: model: preloadd cannot read it: /srv/closed" in told
        assert "/srv/closed/model" in started(host, "c").stderr
        journal = host.machine.messages(rank(spare))
        assert any("/srv/closed/model" in text for text in journal)


def test_a_token_file_that_others_can_read_is_refused(host: Host) -> None:
    assert host.ctl("token", "create", "one").returncode == 0
    host.machine.run("chmod", "644", "/var/lib/preloadd/tokens.json")
    done = host.ctl("token", "list")
    assert done.returncode != 0
    assert "tokens.json is open to group or others" in done.stderr
    assert "chmod 600" in done.stderr
    assert "tokens.json" in diagnosed(host)
    host.machine.run("chmod", "600", "/var/lib/preloadd/tokens.json")
    assert host.ctl("token", "revoke", "one").returncode == 0


@pytest.fixture
def port_taken(host: Host) -> Iterator[None]:
    """Another program listens where the supervisor would."""
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 9470)); time.sleep(600)"
    lines = ["[Service]", f'ExecStart=/usr/bin/python3 -c "{code}"', ""]
    host.machine.write("/run/systemd/system/other.service", "\n".join(lines))
    host.machine.systemctl("daemon-reload")
    host.machine.systemctl("stop", SUPERVISOR)
    host.machine.systemctl("start", "other.service")
    host.until(lambda: reachable(host), "listener")
    yield
    host.machine.systemctl("stop", "other.service")
    host.machine.systemctl("start", SUPERVISOR)
    assert host.health()[0] == 200


def reachable(host: Host) -> bool:
    ask = ["curl", "--silent", "--max-time", "0.1", HEALTH]
    return host.machine.run(*ask, check=False).returncode == TIMED_OUT


def test_a_port_that_is_taken_is_told(host: Host, port_taken: None) -> None:
    assert host.machine.systemctl("start", SUPERVISOR, check=False).returncode != 0
    told = host.machine.messages(SUPERVISOR)
    assert any("9470" in text and "choose another" in text for text in told)
    # Trying again cannot mend that.
    assert host.machine.show(SUPERVISOR, "NRestarts") == "0"
    assert "cannot listen on 127.0.0.1:9470" in diagnosed(host)
    assert host.ctl("status").returncode == 0


@pytest.fixture
def full(host: Host) -> Iterator[None]:
    """The state folder holds one token, and nothing more fits in it."""
    state = "/var/lib/preloadd"
    options = "size=8k,mode=750,uid=preloadd,gid=preloadd"
    host.machine.run("mount", "-t", "tmpfs", "-o", options, "tmpfs", state)
    host.ctl("token", "create", "one")
    host.machine.run("sh", "-c", f"cat /dev/zero >{state}/full || true")
    yield
    host.machine.run("umount", state)


def test_a_full_state_folder_is_told_and_what_was_in_it_stays(host: Host, full: None) -> None:
    done = host.ctl("token", "create", "two")
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
    assert "Nothing was changed" in done.stderr
    listed = json.loads(host.ctl("token", "list", "--json").stdout)["tokens"]
    assert [one["name"] for one in listed] == ["one"]


def test_a_group_comes_up_with_a_full_state_folder(host: Host, spare: str, full: None) -> None:
    with changed(host, "c", definition(f'["{spare}"]')):
        assert host.ctl("start", "c").returncode == 0
        assert host.told_by(spare).state == "serving"


def test_a_manager_that_keeps_nothing_is_told(host: Host, spare: str) -> None:
    dropin = f"/run/systemd/system/{rank(spare)}.d/store.conf"
    host.machine.write(dropin, "[Service]\nFileDescriptorStoreMax=0\n")
    with changed(host, "c", definition(f'["{spare}"]')):
        assert host.ctl("start", "c").returncode == 0
        journal = host.machine.messages(rank(spare))
        assert any("these weights would be lost with this process" in text for text in journal)
        assert any("FileDescriptorStoreMax=512" in text for text in journal)
    host.machine.path(dropin).unlink()
    host.machine.systemctl("daemon-reload")


def test_a_generator_that_crashes_is_told_and_takes_nothing_away(host: Host) -> None:
    path = "/usr/lib/systemd/system-generators/preloadd-generator"
    before = host.machine.path(path).read_text()
    host.machine.write(path, "#!/bin/sh\nkill -9 $$\n", mode=0o755)
    host.machine.systemctl("daemon-reload")
    told = diagnosed(host)
    assert f"systemd knows no group of {', '.join(ALL)}" in told
    assert path in told
    assert host.ctl("status").returncode == 0
    host.machine.write(path, before, mode=0o755)
    host.machine.systemctl("daemon-reload")
    assert host.ctl("doctor").returncode == 0


def diagnosed(host: Host) -> str:
    """What doctor finds on a machine where something is wrong."""
    done = host.ctl("doctor")
    assert done.returncode == WRONG, done
    return done.stdout
