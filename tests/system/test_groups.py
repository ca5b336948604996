"""Groups on a real manager, with a stand-in for the ranks: who goes down and up with whom."""

from __future__ import annotations

import pytest

from tests.system.host import DRAFTED, Host, group, rank

A = ("CPU-0", "CPU-1", "CPU-2")
B = ("CPU-3", "CPU-4")


@pytest.fixture
def two(host: Host) -> Host:
    """Two groups that serve."""
    host.write_group("a", A)
    host.write_group("b", B)
    host.start()
    return host


def assert_barrier(host: Host, instances: tuple[str, ...]) -> None:
    """No rank of the last attempt began before the last one of an earlier attempt had ended."""
    ended = max(times[-1] for i in instances if (times := host.told(i, "ended")))
    began = min(host.told(i, "began")[-1] for i in instances)
    assert ended < began


def kill_and_wait(host: Host) -> None:
    """Kill a rank of group a, and wait until the group serves again or is down for good."""
    none = {0, *host.pids(A)}
    host.kill(A[0])

    def is_over() -> bool:
        others = not none & set(host.pids(A))
        states = host.states(A)
        return (others and states == {"active"}) or "failed" in states <= {"failed", "inactive"}

    host.until(is_over, "recovery or giving up")


def is_told(host: Host) -> bool:
    """Whether somebody said that group a is down for good."""
    told = host.machine.messages("preloadd-down@a.service")
    return any("given up: the ranks of group a are stopped" in text for text in told)


def test_a_start_waits_until_every_rank_serves(host: Host) -> None:
    host.behave("CPU-4", load_s=1)
    host.write_group("a", A)
    host.write_group("b", B)
    with host.machine.running("systemctl", "start", "preloadd.target") as start:
        host.until(lambda: host.states([*A, B[0]]) == {"active"}, "the faster ranks")
        assert host.state(group("a")) == "active"
        assert host.state(group("b")) == "inactive"
        assert start.poll() is None
        assert start.wait(10) == 0
    assert host.states([*A, *B]) == {"active"}
    assert host.state("preloadd.target") == "active"


def test_a_load_may_take_longer_than_a_start(host: Host) -> None:
    host.limit(TimeoutStartSec="700ms")
    host.behave("CPU-0", load_s=2)
    host.write_group("a", ["CPU-0"])
    host.start()
    assert host.machine.show(rank("CPU-0"), "NRestarts") == "0"


@pytest.mark.parametrize("way", ["killed", "ended", "hung", "two", "all"])
def test_a_rank_takes_its_group_down_and_back_with_all_weights(two: Host, way: str) -> None:
    two.limit(WatchdogSec="1s")
    two.machine.systemctl("restart", "preloadd.target")
    weights, old, others = two.weights(A), two.pids(A), two.pids(B)
    victims = {"two": A[:2], "all": A}.get(way, A[:1])
    for victim in victims:
        two.kill(victim, {"ended": "USR1", "hung": "USR2"}.get(way, "KILL"))
    took = two.until_back(A, old)
    assert took < 3 + (1 if way == "hung" else 0)
    assert two.weights(A) == weights
    assert {two.stored(instance) for instance in A} == {1}
    if way != "all":
        assert_barrier(two, A)
    assert two.pids(B) == others
    assert two.state("preloadd.target") == "active"


def test_a_stopped_rank_is_noticed_by_the_watchdog(two: Host) -> None:
    two.limit(WatchdogSec="1s")
    two.machine.systemctl("restart", group("a"))
    weights, old = two.weights(A), two.pids(A)
    two.kill(A[0], "STOP")
    assert two.until_back(A, old) < 5
    assert two.weights(A) == weights


def test_a_rank_that_dies_while_its_group_comes_up_is_one_more_failure(two: Host) -> None:
    weights, old, others = two.weights(A), two.pids(A), two.pids(B)
    two.behave(A[1], exit=1)
    two.kill(A[0])
    two.until(lambda: len(two.told(A[1], "began")) > 2, "a second attempt")
    two.behave(A[1])
    two.until_back(A, old)
    assert two.weights(A) == weights
    assert two.pids(B) == others


def test_a_rank_that_does_not_end_is_killed_in_time(two: Host) -> None:
    two.limit(TimeoutStopSec="1s")
    two.behave(A[2], deaf=True)
    two.machine.systemctl("restart", group("a"))
    weights, old = two.weights(A), two.pids(A)
    two.kill(A[0])
    assert 1 < two.until_back(A, old) < 4
    assert two.weights(A) == weights


def test_a_rank_that_ends_slowly_is_waited_for(two: Host) -> None:
    two.behave(A[2], stop_s=0.7)
    two.machine.systemctl("restart", group("a"))
    old = two.pids(A)
    two.kill(A[0])
    two.until_back(A, old)
    assert_barrier(two, A)


def test_a_broken_group_fails_the_start_and_is_named_while_the_other_serves(host: Host) -> None:
    host.behave(A[1], exit=1)
    host.write_group("a", A, burst=4, interval_s=60)
    host.write_group("b", B)
    start = host.machine.systemctl("start", "preloadd.target", check=False)
    assert start.returncode != 0
    assert host.states(B) == {"active"}
    host.until(lambda: host.states(A) <= {"failed", "inactive"}, "the end of a")
    told = host.machine.messages("preloadd-ready.service")
    assert any("group a does not serve" in text for text in told)
    assert not any("group b" in text for text in told)
    assert host.state("preloadd-supervisor.service") == "active"

    host.behave(A[1])
    others = host.pids(B)
    host.machine.systemctl("reset-failed", "preloadd@*")
    host.start()
    assert host.states([*A, *B]) == {"active"}
    assert host.pids(B) == others


def test_a_group_that_fails_again_and_again_stays_down_and_says_so(two: Host) -> None:
    two.write_group("a", A, burst=3, interval_s=60)
    others = two.pids(B)
    lives = 0
    while two.states(A) == {"active"}:
        lives += 1
        kill_and_wait(two)
    assert 2 <= lives <= 4
    assert two.state(group("a")) == "inactive"
    two.until(lambda: is_told(two), "word that group a is stopped")
    assert two.pids(B) == others
    assert {two.stored(instance) for instance in A} == {0}

    two.machine.systemctl("reset-failed", "preloadd@*")
    two.machine.systemctl("start", group("a"))
    assert two.states(A) == {"active"}


def test_a_wrong_configuration_is_not_tried_again(host: Host) -> None:
    host.behave(A[1], exit=78)
    host.write_group("a", A)
    assert host.machine.systemctl("start", "preloadd.target", check=False).returncode != 0
    assert host.machine.show(rank(A[1]), "ExecMainStatus") == "78"
    assert len(host.told(A[1], "began")) == 1
    host.until(lambda: host.states(A) <= {"failed", "inactive"}, "the end of the group")


@pytest.mark.parametrize("what", ["preloadd.target", group("a"), rank(A[0])])
def test_a_restart_keeps_all_weights(two: Host, what: str) -> None:
    weights, old, others = two.weights([*A, *B]), two.pids(A), two.pids(B)
    two.machine.systemctl("restart", what)
    two.until_back(A, old)
    assert two.weights([*A, *B]) == weights
    assert_barrier(two, A)
    assert (two.pids(B) == others) == (what != "preloadd.target")


@pytest.mark.parametrize("what", ["daemon-reload", "daemon-reexec"])
def test_the_manager_may_be_renewed(two: Host, what: str) -> None:
    weights, old = two.weights([*A, *B]), two.pids([*A, *B])
    two.machine.systemctl(what)
    assert two.pids([*A, *B]) == old
    two.kill(A[0])
    two.until_back(A, old[: len(A)])
    assert two.weights([*A, *B]) == weights


def test_a_stop_frees_and_a_start_loads(two: Host) -> None:
    weights = two.weights([*A, *B])
    two.machine.systemctl("stop", "preloadd.target", "preloadd@*.service")
    assert two.states([*A, *B]) == {"inactive"}
    assert {two.stored(instance) for instance in [*A, *B]} == {0}
    assert list(two.machine.path("/run/preloadd").iterdir()) == []
    assert list(two.machine.path("/run/preloadd-rendezvous").iterdir()) == []
    two.start()
    assert not set(weights) & set(two.weights([*A, *B]))


def test_a_stop_of_one_group_leaves_the_other(two: Host) -> None:
    others = two.pids(B)
    two.machine.systemctl("stop", group("a"))
    two.until(lambda: two.states(A) == {"inactive"}, "the end of a")
    assert {two.stored(instance) for instance in A} == {0}
    assert two.pids(B) == others
    two.machine.systemctl("start", group("a"))
    assert two.states(A) == {"active"}


def test_a_stop_of_one_rank_stops_its_group(two: Host) -> None:
    others = two.pids(B)
    two.machine.systemctl("stop", rank(A[0]))
    two.until(lambda: two.states(A) == {"inactive"}, "the end of a")
    assert two.pids(B) == others


def test_a_draft_belongs_to_its_target(host: Host) -> None:
    host.write_group("a", A[:1], more=DRAFTED)
    host.start()
    both = (A[0], f"{A[0]}.draft")
    weights, old = host.weights(both), host.pids(both)
    host.kill(both[1])
    host.until_back(both, old)
    assert host.weights(both) == weights
    assert_barrier(host, both)


def test_a_broken_file_fails_the_start_and_is_named_while_groups_serve(host: Host) -> None:
    host.write_group("b", B)
    host.machine.write("/etc/preloadd/groups.d/a.toml", "name = ")
    host.machine.systemctl("daemon-reload")
    assert host.machine.systemctl("start", "preloadd.target", check=False).returncode != 0
    assert host.states(B) == {"active"}
    told = host.machine.messages("preloadd-ready.service")
    assert any("a.toml is refused" in text for text in told)


@pytest.mark.parametrize(
    "fault",
    [
        "echo 'name = ' >/etc/preloadd/groups.d/a.toml",
        "printf '#!/bin/sh\\nkill -9 $$\\n' >/usr/lib/systemd/system-generators/preloadd-generator",
        "rm /usr/lib/systemd/system-generators/preloadd-generator",
    ],
)
def test_no_fault_of_the_configuration_loses_weights(two: Host, fault: str) -> None:
    weights, old = two.weights([*A, *B]), two.pids([*A, *B])
    two.machine.run("sh", "-c", fault)
    two.machine.systemctl("daemon-reload")
    assert two.pids([*A, *B]) == old
    assert {two.stored(instance) for instance in [*A, *B]} == {1}
    two.write_group("a", A)
    assert two.weights([*A, *B]) == weights
