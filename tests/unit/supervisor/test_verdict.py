import pytest

from preloadd.domain.lifecycle import State
from preloadd.supervisor.verdict import (
    CONDITIONS,
    Contact,
    Snapshot,
    Unit,
    complaint,
    groups,
    judge,
)

SERVING = Snapshot("CPU-0", State.SERVING)
ABSENT = Snapshot("CPU-1", contact=Contact.ABSENT, problem="no socket")
STUCK = Snapshot("CPU-1", contact=Contact.STUCK, pid=7, silent_s=3.4)


def unit(active: str, **more) -> Unit:
    return Unit("preloadd@CPU-1.service", active, **more)


def under(snapshot: Snapshot, given: Unit) -> Snapshot:
    return Snapshot(
        snapshot.instance,
        contact=snapshot.contact,
        problem=snapshot.problem,
        silent_s=snapshot.silent_s,
        unit=given,
    )


@pytest.mark.parametrize("count", [1, 3])
def test_serving_ranks_are_healthy(count):
    assert judge([SERVING] * count).healthy
    assert judge([SERVING] * count).reasons == ()


def test_no_ranks_are_not_healthy():
    verdict = judge([])
    assert not verdict.healthy
    assert "no rank" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("snapshot", "reason"),
    [
        (ABSENT, "CPU-1: no socket"),
        (Snapshot("CPU-1"), "CPU-1: did not tell its state"),
        (Snapshot("CPU-1", State.STARTING), "CPU-1: starting"),
        (Snapshot("CPU-1", State.LOADING), "CPU-1: loading"),
        (
            Snapshot("CPU-1", State.LOADING, phase="loading", done=1_500, total=3_000),
            "CPU-1: loading, 1.5 KiB of 2.9 KiB (50%)",
        ),
        (
            Snapshot("CPU-1", State.LOADING, phase="storing", done=1_500, total=3_000),
            "CPU-1: loading, storing 1.5 KiB of 2.9 KiB (50%)",
        ),
        (Snapshot("CPU-1", State.LOADING, phase="creating"), "CPU-1: loading, creating"),
        (
            Snapshot("CPU-1", State.LOADING, done=1_500, total=3_000),
            "CPU-1: loading, 1.5 KiB of 2.9 KiB (50%)",
        ),
        (
            Snapshot("CPU-1", State.LOADING, detail="reading", done=0, total=10),
            "CPU-1: loading, 0 B of 10 B (0%): reading",
        ),
        (Snapshot("CPU-1", State.RELEASED), "CPU-1: released"),
        (Snapshot("CPU-1", State.FAILED, detail="disk"), "CPU-1: failed: disk"),
        (Snapshot("CPU-1", State.STOPPING, group="llama"), "CPU-1 of llama: stopping"),
        (
            Snapshot("CPU-1", State.SERVING, "answers as CPU-7", Contact.FAULTY),
            "CPU-1: answers as CPU-7",
        ),
        (
            Snapshot("CPU-1", State.SERVING, divided="CPU-0 has other files"),
            "CPU-1: CPU-0 has other files",
        ),
        (
            STUCK,
            "CPU-1: stuck: no answer for 3 s (process 7): see its log, and restart it if it hangs",
        ),
    ],
)
def test_one_rank_that_does_not_serve_is_enough_and_named(snapshot, reason):
    verdict = judge([SERVING, snapshot])
    assert not verdict.healthy
    assert verdict.reasons == (reason,)


@pytest.mark.parametrize("state", State)
def test_only_serving_is_healthy(state):
    assert judge([Snapshot("CPU-0", state)]).healthy is (state is State.SERVING)


@pytest.mark.parametrize("silent", [ABSENT, STUCK])
@pytest.mark.parametrize(
    ("given", "condition", "said"),
    [
        (unit("activating", status="weights 40%"), "starting", "is starting: weights 40%"),
        (
            unit("activating", sub_state="auto-restart", result="signal"),
            "starting",
            "about to be restarted (signal)",
        ),
        (unit("deactivating"), "stopping", "is deactivating"),
        (
            unit("failed", result="start-limit-hit"),
            "failed",
            "(start-limit-hit): see `journalctl -u preloadd@CPU-1.service`, then `systemctl reset",
        ),
    ],
)
def test_of_a_rank_that_does_not_answer_the_service_manager_knows_more(
    silent, given, condition, said
):
    snapshot = under(silent, given)
    assert snapshot.condition == condition
    assert said in complaint(snapshot)
    assert given.name in complaint(snapshot)


def test_a_stopped_unit_is_said_with_its_remedy():
    snapshot = under(ABSENT, unit("inactive", result="success"))
    assert snapshot.condition == "absent"
    assert complaint(snapshot) == "preloadd@CPU-1.service is stopped: start its group"


def test_a_running_unit_excuses_nothing():
    assert complaint(under(ABSENT, unit("active"))) == "no socket"
    assert under(STUCK, unit("active")).condition == "stuck"
    assert "stuck" in complaint(under(STUCK, unit("active")))


@pytest.mark.parametrize("contact", Contact)
def test_every_condition_is_one_of_those_listed(contact):
    for state in (None, *State):
        for active in ("active", "activating", "deactivating", "failed", "inactive", "maintenance"):
            assert Snapshot("x", state, "", contact, unit=unit(active)).condition in CONDITIONS


def test_groups_have_a_verdict_each():
    bad = Snapshot("CPU-2", State.FAILED, group="b")
    good = [Snapshot(f"CPU-{n}", State.SERVING, group="a", model="m") for n in range(2)]
    first, second = groups([good[0], bad, good[1]])
    assert (first.name, first.verdict.healthy, first.serving) == ("a", True, 2)
    assert (second.name, second.verdict.healthy, second.serving) == ("b", False, 0)
    assert [rank.instance for rank in first.ranks] == ["CPU-0", "CPU-1"]
    assert first.models == ("m",)


def test_a_daemon_that_runs_is_not_told_to_be_started():
    starting = Snapshot("CPU-1", contact=Contact.STARTING, problem="process 7 runs")
    for active, condition, said in [
        ("inactive", State.STARTING, "process 7 runs"),
        ("active", State.STARTING, "process 7 runs"),
        ("failed", State.FAILED, "preloadd@CPU-1.service has failed"),
    ]:
        seen = under(starting, unit(active))
        assert (seen.condition, complaint(seen)[: len(said)]) == (condition, said)
