"""The demo model under systemd: what a start waits for and returns, and who tells what of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.system import demo
from tests.system.conftest import Boot
from tests.system.demo import A, B, Engine
from tests.system.host import Host

ALL = (*A, *B)


@pytest.fixture(scope="module")
def host(boot: Boot) -> Iterator[Host]:
    """A machine that was booted with both groups."""
    with demo.booted(boot) as host:
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


def test_a_broken_group_fails_the_start_and_is_named_while_the_other_serves(serving: Host) -> None:
    file = "/etc/preloadd/groups.d/b.toml"
    before = serving.machine.path(file).read_text()
    serving.machine.systemctl("stop", "preloadd.target", "preloadd@*.service")
    serving.machine.write(file, before.replace(demo.MODEL, "/srv/missing"))
    serving.machine.systemctl("daemon-reload")
    try:
        start = serving.machine.systemctl("start", "preloadd.target", check=False)
        assert start.returncode != 0
        told = serving.machine.messages("preloadd-ready.service")
        assert any("group b does not serve" in text for text in told)
        assert any("/srv/missing" in text for text in serving.machine.messages("preloadd@CPU-2"))
        status, found = conditions(serving)
        assert status == 1
        assert found == {**dict.fromkeys(A, "serving"), B[0]: "failed"}
        table = serving.ctl("status").stdout
        assert "/srv/missing" in table
        serving.until(lambda: serving.health()[0] == 503, "bad health")
        groups = serving.health()[1]["groups"]
        assert {group["name"]: group["healthy"] for group in groups} == {"a": True, "b": False}
        with Engine(serving, A) as engine:
            engine.until_answered()
    finally:
        serving.machine.write(file, before)
        serving.machine.systemctl("daemon-reload")
    lives = serving.lives(A)
    assert serving.ctl("start", "b").returncode == 0
    assert conditions(serving) == (0, dict.fromkeys(ALL, "serving"))
    assert serving.lives(A) == lives
