"""Ranks of the demo model that fail while an engine answers from them, on a real manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.system import demo
from tests.system.demo import A, B, Engine
from tests.system.host import Boot, Host, group, rank

BACK_S = 3.0
"""How long a group may be down whose ranks obey SIGTERM."""

SILENCE_S = 3.0
"""Longer than an answer takes while ranks start on the same two cores; shorter than an outage."""


@pytest.fixture(scope="module")
def host(boot: Boot) -> Iterator[Host]:
    """A machine with two groups that may fail as often as tests like, and its own watchdog."""
    with demo.booted(boot, more="restart.burst = 1000") as host:
        yield host


@pytest.fixture(scope="module")
def engine(host: Host) -> Iterator[Engine]:
    """One engine for all of the tests: it is to outlive them."""
    with Engine(host, A) as engine:
        engine.until_answered()
        yield engine


def kill(host: Host) -> None:
    host.kill(A[0])


def hang(host: Host) -> None:
    host.kill(A[1], "STOP")


def end(host: Host) -> None:
    host.kill(A[1], "TERM")


def kill_two(host: Host) -> None:
    for instance in A:
        host.kill(instance)


def kill_again(host: Host) -> None:
    """Kill one rank, and another one while the group comes up."""
    old = host.pid(A[1])
    host.kill(A[0])
    host.until(lambda: host.pid(A[1]) not in (0, old), "next life")
    assert host.state(rank(A[1])) == "activating"
    host.kill(A[1])


@pytest.mark.parametrize("fail", [kill, end, kill_two, kill_again])
def test_a_group_comes_back_with_its_weights_while_its_engine_answers(
    host: Host, engine: Engine, fail: Callable[[Host], None]
) -> None:
    fails_and_comes_back(host, engine, fail, within=BACK_S)


def test_a_rank_that_hangs_is_noticed_by_the_watchdog(host: Host, engine: Engine) -> None:
    host.limit(WatchdogSec="2s")
    host.machine.systemctl("restart", group("a"))
    try:
        # The watchdog, a second for the signal that a stopped process ignores, and the return.
        fails_and_comes_back(host, engine, hang, within=2 + 1 + BACK_S)
    finally:
        host.limit()


def fails_and_comes_back(
    host: Host, engine: Engine, fail: Callable[[Host], None], *, within: float
) -> None:
    before, others, answering = host.lives(A), host.lives(B), engine.pid
    fail(host)
    took = host.until_back(A, [pid for pid, _ in before])
    print(f"back after {took:.2f} s")
    assert took <= within
    assert [generation for _, generation in host.lives(A)] == [found for _, found in before]
    for instance in A:
        told = host.told_by(instance)
        assert told.adopted
        assert (told.counters["loads"], told.counters["bytes_read"]) == (0, 0)
        assert [lease.pid for lease in told.leases] == [answering]
    assert host.lives(B) == others
    engine.until_answered()
    assert engine.pid == answering
    assert {answer["answer"] for answer in engine.answers()} == {demo.ANSWER}
    print(f"no answer for {engine.longest_silence:.2f} s at most")
    assert engine.longest_silence < SILENCE_S
