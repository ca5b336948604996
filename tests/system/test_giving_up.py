"""A real group that fails too often: it stays down, all say so, and it can be brought back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import installed
from tests.system.host import Boot, Host, group

A = ("CPU-0", "CPU-1")
B = ("CPU-2",)


@pytest.fixture
def given_up(boot_once: Boot, tiny: Path) -> Iterator[Host]:
    """Group `a` was killed until systemd gave it up; group `b` serves."""
    with boot_once(program=installed.REAL, binds=[(tiny, "/srv/model")]) as host:
        host.write_real_group("a", A, burst=2, interval_s=600)
        host.write_real_group("b", B)
        host.start()
        fail_for_good(host)
        yield host


def fail_for_good(host: Host) -> None:
    """Kill a rank of group `a` whenever the group is up, until it is not brought back."""

    def is_down() -> bool:
        states = host.states(A)
        if states == {"active"}:
            host.kill(A[0])
        return "failed" in states <= {"failed", "inactive"}

    host.until(is_down, "giving up")
    until_settled(host)


def until_settled(host: Host) -> None:
    """Wait until what takes the rest of group `a` down is through: it would end a new start."""
    host.until(lambda: host.state("preloadd-down@a.service") == "inactive", "its last step")


def test_a_group_that_was_given_up_is_down_and_everybody_says_so(given_up: Host) -> None:
    host = given_up
    others = host.lives(B)
    told = host.machine.messages("preloadd-down@a.service")
    assert any("given up: the ranks of group a are stopped" in text for text in told)
    done = host.ctl("status")
    assert done.returncode == 1
    assert "systemd gave up" in done.stdout
    assert "preloadctl start a" in done.stdout
    host.until(lambda: host.health()[0] == 503, "bad health")
    assert host.state(group("a")) == "inactive"
    assert {host.stored(instance) for instance in A} == {0}
    assert host.lives(B) == others


def test_a_group_that_was_given_up_can_be_brought_back(given_up: Host) -> None:
    others = given_up.lives(B)
    assert given_up.machine.systemctl("start", group("a"), check=False).returncode != 0
    until_settled(given_up)
    given_up.machine.systemctl("reset-failed", "preloadd@*")
    given_up.machine.systemctl("start", group("a"))
    assert_loaded(given_up)
    fail_for_good(given_up)
    assert given_up.ctl("start", "a").returncode == 0
    assert_loaded(given_up)
    assert given_up.lives(B) == others


def assert_loaded(host: Host) -> None:
    """Group `a` serves weights that it has read again, and all is well."""
    assert host.states(A) == {"active"}
    assert {host.told_by(instance).counters["loads"] for instance in A} == {1}
    assert host.ctl("status").returncode == 0
