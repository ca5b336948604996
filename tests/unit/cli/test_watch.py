from dataclasses import replace

import pytest

from preloadd.cli.overview import Condition, Holder, Rank, overview
from preloadd.cli.watch import changes, explained, moments, state

SOCKET = "/s/CPU-0/rank.sock"
SERVING = Rank("CPU-0", Condition.SERVING, group="g", socket=SOCKET, pid=1, lease_count=0)
LOADING = replace(SERVING, condition=Condition.LOADING, total=100)
ENGINE = Holder("vllm", 7, "zero_copy", "")


def seen(*ranks, notes=()):
    return overview(ranks, {}, notes)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ([SERVING], [SERVING], []),
        ([SERVING], [replace(SERVING, uptime_s=9.0, rate=3.0)], []),
        ([], [SERVING], ["g CPU-0: new -> serving"]),
        ([SERVING], [], ["g CPU-0: gone"]),
        ([SERVING], [replace(SERVING, pid=2)], ["g CPU-0: serving as process 2, was 1"]),
        (
            [SERVING],
            [replace(SERVING, condition=Condition.STUCK, detail="deaf", lease_count=None)],
            ["g CPU-0: serving -> stuck: deaf"],
        ),
        (
            [SERVING],
            [replace(SERVING, detail="no persistence")],
            ["g CPU-0: warning: no persistence"],
        ),
        ([replace(SERVING, detail="x")], [replace(SERVING, detail="x")], []),
        (
            [SERVING],
            [replace(SERVING, divided="x", detail="x")],
            ["g CPU-0: serving -> divided: x"],
        ),
        ([replace(SERVING, divided="x")], [SERVING], ["g CPU-0: divided -> serving"]),
        ([replace(LOADING, done=11)], [replace(LOADING, done=19)], []),
        (
            [replace(LOADING, done=19)],
            [replace(LOADING, done=20, rate=5.0)],
            ["g CPU-0: 20 B of 100 B (20%), 5 B/s"],
        ),
        (
            [replace(LOADING, phase="storing", done=42)],
            [replace(LOADING, phase="opening", total=0, pid=2)],
            ["g CPU-0: loading as process 2, was 1: opening"],
        ),
        (
            [replace(SERVING, condition=Condition.RELEASED, detail="was released")],
            [replace(LOADING, phase="opening", total=0)],
            ["g CPU-0: released -> loading: opening"],
        ),
        (
            [replace(LOADING, phase="opening", total=0)],
            [replace(LOADING, phase="creating", total=0)],
            ["g CPU-0: creating"],
        ),
        (
            [replace(LOADING, phase="loading", done=42)],
            [replace(LOADING, phase="storing", done=42, rate=5.0)],
            ["g CPU-0: storing 42 B of 100 B (42%), 5 B/s"],
        ),
        (
            [replace(LOADING, phase="storing", done=42)],
            [replace(LOADING, phase="storing", done=49, rate=5.0)],
            [],
        ),
        (
            [replace(LOADING, phase="storing", done=99)],
            [replace(LOADING, total=0, detail="warming up")],
            ["g CPU-0: warming up"],
        ),
        (
            [replace(LOADING, phase="storing", done=99)],
            [SERVING],
            ["g CPU-0: loading -> serving"],
        ),
        (
            [SERVING],
            [replace(SERVING, leases=(ENGINE,), lease_count=1)],
            ["g CPU-0: vllm (pid 7) attached"],
        ),
        (
            [replace(SERVING, leases=(ENGINE,), lease_count=1)],
            [SERVING],
            ["g CPU-0: vllm (pid 7) left"],
        ),
    ],
)
def test_what_matters_of_what_changed(before, after, lines):
    assert changes(seen(*before), seen(*after)) == lines


def test_a_note_is_told_once():
    before, after = seen(SERVING), seen(SERVING, notes=["systemd hangs"])
    assert changes(before, after) == ["systemd hangs"]
    assert changes(after, after) == []


def test_a_rank_of_systemd_is_the_same_with_and_without_a_socket():
    rank = replace(SERVING, unit="preloadd@CPU-0.service")
    absent = replace(rank, condition=Condition.ABSENT, socket="", lease_count=None)
    assert changes(seen(rank), seen(absent)) == ["g CPU-0: serving -> absent"]


def test_moments_tell_the_speed_of_loads():
    looks = iter([seen(LOADING), seen(replace(LOADING, done=50))])
    slept = []
    found = moments(lambda: next(looks), 3.0, sleep=slept.append)
    assert next(found).ranks[0].rate == 0.0
    assert next(found).ranks[0].rate > 50
    assert slept == [3.0]


def test_words_of_a_state():
    assert state(LOADING) == "loading 0%"
    assert explained(replace(LOADING, detail="slow disk")) == "slow disk; 0 B of 100 B (0%)"
    assert explained(replace(LOADING, phase="loading", done=9)) == "9 B of 100 B (9%)"
    assert explained(replace(LOADING, phase="storing", done=9)) == "storing 9 B of 100 B (9%)"
    assert explained(replace(LOADING, phase="creating", total=0)) == "creating"
    assert explained(SERVING) == ""
    failed = replace(LOADING, condition=Condition.FAILED, phase="storing", done=9)
    assert (state(failed), explained(failed)) == ("failed", "")
