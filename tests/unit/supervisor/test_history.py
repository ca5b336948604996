from dataclasses import replace

import pytest

from preloadd.domain.lifecycle import State
from preloadd.supervisor.history import happenings
from preloadd.supervisor.verdict import Contact, Engine, Snapshot

VLLM = Engine("vllm", 9, "zero_copy", "1" * 16)
SERVING = Snapshot(
    "CPU-0", State.SERVING, group="g", pid=7, generation="a" * 32, lease_count=1, engines=(VLLM,)
)
STUCK = replace(SERVING, state=None, contact=Contact.STUCK, silent_s=2.0)
ABSENT = Snapshot("CPU-0", group="g", contact=Contact.ABSENT, problem="no socket")


def told(before: Snapshot | None, after: Snapshot) -> list[str]:
    return [happening.text for happening in happenings(before, after, at=1.0)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, SERVING, ["serving, weights loaded"]),
        (None, replace(SERVING, contact=Contact.FAULTY, problem="wrong"), ["wrong"]),
        (SERVING, SERVING, []),
        (SERVING, replace(SERVING, age_s=3.0, uptime_s=9.0), []),
        (STUCK, replace(STUCK, silent_s=3.0), []),
        (SERVING, ABSENT, ["no socket"]),
        (ABSENT, replace(SERVING, adopted=True, lease_count=0, engines=()), [
            "serving, weights adopted"
        ]),
        (SERVING, replace(SERVING, pid=8), ["restarted: process 8 after 7"]),
        (
            SERVING,
            replace(SERVING, generation="b" * 32),
            ["generation bbbbbbbb after aaaaaaaa, weights loaded"],
        ),
        (
            SERVING,
            replace(SERVING, lease_count=0, engines=()),
            ["engine vllm (process 9) left"],
        ),
        (
            replace(SERVING, lease_count=0, engines=()),
            SERVING,
            ["engine vllm (process 9) attached, zero_copy"],
        ),
    ],
)  # fmt: skip
def test_what_differs_is_told_once(before, after, expected):
    assert told(before, after) == expected


def test_a_rank_that_gets_stuck_is_told_with_the_remedy():
    (text,) = told(SERVING, STUCK)
    assert "stuck" in text
    assert "restart it" in text


def test_leases_are_not_guessed_where_the_list_was_cut():
    many = replace(SERVING, lease_count=500)
    assert told(many, replace(many, engines=())) == []


def test_a_happening_says_when_and_where():
    (happening,) = happenings(SERVING, ABSENT, at=5.0)
    assert (happening.at, happening.group, happening.instance) == (5.0, "g", "CPU-0")
    assert happening.condition == "absent"
