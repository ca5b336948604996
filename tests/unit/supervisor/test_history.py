from dataclasses import replace

import pytest

from preloadd.domain.lifecycle import State
from preloadd.supervisor.history import History
from preloadd.supervisor.verdict import Contact, Engine, Snapshot

VLLM = Engine("vllm", 9, "zero_copy", "1" * 16)
SERVING = Snapshot(
    "CPU-0", State.SERVING, group="g", pid=7, generation="a" * 32, lease_count=1, engines=(VLLM,)
)
STUCK = replace(SERVING, state=None, contact=Contact.STUCK, silent_s=2.0)
ABSENT = Snapshot("CPU-0", group="g", contact=Contact.ABSENT, problem="no socket")


def told(*looks: Snapshot | None) -> list[str]:
    """What the last of these looks brought to light; None is no look at all."""
    history, texts = History(), []
    for look in looks:
        if look is not None:
            texts = [happening.text for happening in history.add(look, at=1.0)]
    return texts


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, SERVING, ["serving, weights loaded"]),
        (None, replace(SERVING, contact=Contact.FAULTY, problem="wrong"), ["wrong"]),
        (SERVING, SERVING, []),
        (SERVING, replace(SERVING, age_s=3.0, uptime_s=9.0), []),
        (STUCK, replace(STUCK, silent_s=3.0), []),
        (SERVING, ABSENT, ["no socket"]),
        (SERVING, replace(SERVING, divided="other files"), ["other files"]),
        (replace(SERVING, divided="1"), replace(SERVING, divided="2"), []),
        (replace(SERVING, divided="other files"), SERVING, ["serving, weights loaded"]),
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


@pytest.mark.parametrize("meanwhile", [ABSENT, STUCK, replace(ABSENT, contact=Contact.FAULTY)])
def test_what_outlived_a_restart_is_no_news(meanwhile):
    after = replace(SERVING, pid=8, adopted=True)
    assert told(SERVING, meanwhile, after) == [
        "serving, weights adopted",
        "restarted: process 8 after 7",
    ]


def test_what_did_not_outlive_a_restart_is_told():
    after = replace(SERVING, pid=8, generation="b" * 32, lease_count=0, engines=())
    assert told(SERVING, ABSENT, ABSENT, after) == [
        "serving, weights loaded",
        "restarted: process 8 after 7",
        "generation bbbbbbbb after aaaaaaaa, weights loaded",
        "engine vllm (process 9) left",
    ]


def test_leases_are_not_guessed_where_the_list_was_cut():
    many = replace(SERVING, lease_count=500)
    assert told(many, replace(many, engines=())) == []


def test_a_happening_says_when_and_where():
    history = History()
    history.add(SERVING, at=4.0)
    (happening,) = history.add(ABSENT, at=5.0)
    assert (happening.at, happening.group, happening.instance) == (5.0, "g", "CPU-0")
    assert happening.condition == "absent"
