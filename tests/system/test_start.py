"""The demo model under systemd: what a start waits for and returns, and who tells what of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.system import demo
from tests.system.demo import A, B, Engine
from tests.system.host import Boot, Host

ALL = (*A, *B)


@pytest.fixture(scope="module")
def host(boot: Boot) -> Iterator[Host]:
    """A machine that was booted with both groups."""
    with demo.booted(boot, more="restart.burst = 4") as host:
        yield host


@pytest.fixture
def serving(host: Host) -> Host:
    """The same, with both groups up."""
    host.machine.systemctl("reset-failed")
    host.start()
    host.until(lambda: host.health()[0] == 200, "health")
    return host


def conditions(host: Host) -> tuple[int, dict[str, str]]:
    """What `preloadctl status` ends with, and how it says that each rank is."""
    done = host.ctl("status", "--json")
    groups = json.loads(done.stdout)["groups"]
    return done.returncode, {r["instance"]: r["condition"] for g in groups for r in g["ranks"]}


def test_all_serves_once_the_machine_is_up(serving: Host) -> None:
    assert serving.state("multi-user.target") == "active"
    assert conditions(serving) == (0, dict.fromkeys(ALL, "serving"))
    assert serving.health()[1]["healthy"]
    # Manifest, one chunk, listener.
    assert {serving.stored(instance) for instance in ALL} == {3}


def test_an_engine_of_another_user_answers_from_each_group(serving: Host) -> None:
    for devices in (A, B):
        with Engine(serving, devices) as engine:
            engine.until_answered()
            told = json.loads(serving.ctl("leases", "--json").stdout)["leases"]
            assert {(lease["instance"], lease["pid"]) for lease in told} == {
                (device, engine.pid) for device in devices
            }


def test_a_user_without_access_is_refused(serving: Host) -> None:
    ask = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "preloadctl"]
    done = serving.machine.run(*ask, "status", check=False)
    assert done.returncode != 0
    assert "denied" in done.stdout


def test_a_start_returns_when_every_rank_serves(serving: Host) -> None:
    serving.machine.systemctl("stop", "preloadd.target", "preloadd@*.service")
    assert conditions(serving) == (1, dict.fromkeys(ALL, "stopped"))
    assert serving.machine.systemctl("start", "preloadd.target").returncode == 0
    assert {serving.told_by(instance).state for instance in ALL} == {"serving"}


@pytest.fixture
def half(serving: Host) -> Iterator[Host]:
    """The same after a start with a group `b` whose model is not there."""
    file = "/etc/preloadd/groups.d/b.toml"
    right = serving.machine.path(file).read_text()
    serving.machine.systemctl("stop", "preloadd.target", "preloadd@*.service")
    serving.machine.write(file, right.replace(demo.MODEL, "/srv/missing"))
    serving.machine.systemctl("daemon-reload")
    yield serving
    serving.machine.write(file, right)
    serving.machine.systemctl("daemon-reload")


def test_a_broken_group_fails_the_start_and_is_named_while_the_other_serves(half: Host) -> None:
    assert half.machine.systemctl("start", "preloadd.target", check=False).returncode != 0
    told = half.machine.messages("preloadd-ready.service")
    assert any("group b does not serve" in text for text in told)
    assert not any("group a" in text for text in told)
    assert any("/srv/missing" in text for text in half.machine.messages("preloadd@CPU-2"))
    assert conditions(half) == (1, {**dict.fromkeys(A, "serving"), B[0]: "failed"})
    assert "/srv/missing" in half.ctl("status").stdout
    half.until(lambda: half.health()[0] == 503, "bad health")
    groups = half.health()[1]["groups"]
    assert {group["name"]: group["healthy"] for group in groups} == {"a": True, "b": False}


def test_a_broken_group_that_was_mended_is_started_alone(half: Host) -> None:
    refused = half.ctl("start")
    assert refused.returncode == 1
    assert "/srv/missing" in refused.stderr
    before = half.lives(A)
    file = "/etc/preloadd/groups.d/b.toml"
    half.machine.write(file, half.machine.path(file).read_text().replace("missing", "demo"))
    half.machine.systemctl("daemon-reload")
    assert half.ctl("start", "b").returncode == 0
    assert conditions(half) == (0, dict.fromkeys(ALL, "serving"))
    assert half.lives(A) == before
