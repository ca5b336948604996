import pytest

from preloadd.domain.lifecycle import State
from preloadd.supervisor.verdict import Snapshot, judge

SERVING = Snapshot("CPU-0", State.SERVING)


@pytest.mark.parametrize("count", [1, 3])
def test_serving_ranks_are_healthy(count):
    assert judge([SERVING] * count).healthy
    assert judge([SERVING] * count).reasons == ()


def test_a_group_without_ranks_is_not_healthy():
    verdict = judge([])
    assert not verdict.healthy
    assert "no rank" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("snapshot", "reason"),
    [
        (Snapshot("CPU-1", problem="no answer within 2 s"), "CPU-1: no answer within 2 s"),
        (Snapshot("CPU-1"), "CPU-1: did not tell its state"),
        (Snapshot("CPU-1", State.STARTING), "CPU-1: starting"),
        (Snapshot("CPU-1", State.LOADING), "CPU-1: loading"),
        (
            Snapshot("CPU-1", State.LOADING, done=1_500, total=3_000),
            "CPU-1: loading, 1,500 of 3,000 bytes (50%)",
        ),
        (
            Snapshot("CPU-1", State.LOADING, detail="reading", done=0, total=10),
            "CPU-1: loading, 0 of 10 bytes (0%): reading",
        ),
        (Snapshot("CPU-1", State.RELEASED), "CPU-1: released"),
        (Snapshot("CPU-1", State.FAILED, detail="disk"), "CPU-1: failed: disk"),
        (Snapshot("CPU-1", State.STOPPING), "CPU-1: stopping"),
        (
            Snapshot("CPU-1", State.SERVING, problem="answers as CPU-7"),
            "CPU-1: answers as CPU-7",
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
