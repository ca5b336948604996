from dataclasses import replace

import pytest

from preloadd.cli.overview import Condition, Rank
from preloadd.cli.units import Services, ask, disagree, group_units, merge
from preloadd.errors import ConfigError
from preloadd.linux.systemctl import Systemctl, Unit

UNIT = Unit("preloadd@CPU-0.service", "loaded", "active", "running", main_pid=5)
SOCKET = "/r/CPU-0/rank.sock"
TOLD = Rank("CPU-0", Condition.SERVING, group="g", socket=SOCKET, pid=5, lease_count=0)
SILENT = replace(TOLD, condition=Condition.ABSENT, group="", pid=0, lease_count=None)


def one(rank, unit):
    """The rank that comes of a rank and a unit of the same instance."""
    (merged,) = merge([rank] if rank else [], Services(ranks={"CPU-0": unit}))
    return merged


def test_asks_for_groups_that_are_wanted_and_ranks_that_are_loaded(systemd, managed):
    managed("smol", "CPU-3", "CPU-1")
    systemd.unit("preloadd@CPU-9.service", "inactive", "dead")
    systemd.unit("preloadd.target", Wants="preloadd-group@new.target other.target")
    found = ask(Systemctl(systemd.environ))
    assert {name: group.instances for name, group in found.groups.items()} == {
        "new": (),
        "smol": ("CPU-3", "CPU-1"),
    }
    assert sorted(found.ranks) == ["CPU-1", "CPU-3", "CPU-9"]


def test_the_target_that_a_renamed_group_left_behind_is_no_group(systemd, managed):
    managed("new", "CPU-0")
    systemd.unit("preloadd-group@old.target", "active", "active", Requires="")
    assert set(ask(Systemctl(systemd.environ)).groups) == {"new"}


def test_a_rank_that_answers_says_best_how_it_is():
    merged = one(TOLD, replace(UNIT, restarts=2, status="serving"))
    assert (merged.condition, merged.unit, merged.restarts) == (Condition.SERVING, UNIT.name, 2)


def test_a_rank_started_by_hand_is_not_the_units():
    stopped = replace(UNIT, main_pid=0, active="inactive")
    merged = merge([replace(TOLD, pid=99)], Services(ranks={"CPU-0": stopped}))
    assert [(rank.pid, rank.unit != "", rank.condition) for rank in merged] == [
        (99, False, Condition.SERVING),
        (0, True, Condition.STOPPED),
    ]


@pytest.mark.parametrize(
    ("unit", "condition", "detail"),
    [
        (
            {"active": "activating", "sub": "start", "status": "read 4%"},
            Condition.LOADING,
            "read 4%",
        ),
        ({"active": "activating", "sub": "start"}, Condition.STARTING, "process 5 comes up"),
        (
            {"active": "activating", "sub": "auto-restart", "result": "watchdog", "restarts": 3},
            Condition.ABSENT,
            "it ended (watchdog) and is started again, restarts so far: 3",
        ),
        ({"active": "deactivating"}, Condition.STOPPING, ""),
        ({"active": "inactive", "sub": "dead"}, Condition.STOPPED, ""),
        ({"active": "active"}, Condition.ABSENT, "process 5 runs but has no socket in"),
        (
            {"active": "failed", "result": "start-limit-hit"},
            Condition.FAILED,
            "systemd gave up (",
        ),
        (
            {"active": "failed", "status": "serving m (adopted)", "result": "start-limit-hit"},
            Condition.FAILED,
            "systemd gave up (start-limit-hit)",
        ),
        (
            {"active": "failed", "status": "failed: no room", "result": "exit-code"},
            Condition.FAILED,
            "no room: systemd gave up (exit-code)",
        ),
        (
            {"loaded": "not-found"},
            Condition.ABSENT,
            "systemd cannot use preloadd@CPU-0",
        ),
    ],
)
@pytest.mark.parametrize("rank", [None, SILENT])
def test_of_a_rank_that_does_not_answer_systemd_knows_better(rank, unit, condition, detail):
    merged = one(rank, replace(UNIT, **unit))
    assert (merged.condition, merged.detail[: len(detail)]) == (condition, detail)
    assert merged.unit == UNIT.name


def test_a_rank_that_hangs_stays_stuck_and_one_that_comes_up_is_not():
    stuck = replace(SILENT, condition=Condition.STUCK, pid=5)
    assert one(stuck, UNIT).condition is Condition.STUCK
    assert one(stuck, replace(UNIT, active="activating")).condition is Condition.STARTING


def test_a_silent_rank_is_in_the_group_of_its_neighbours_if_there_is_but_one():
    other = replace(SILENT, instance="CPU-1", socket="/r/CPU-1/rank.sock")
    away = replace(SILENT, instance="CPU-2", socket="/elsewhere/CPU-2/rank.sock")
    third = replace(TOLD, instance="CPU-3", group="h", socket="/r/CPU-3/rank.sock")
    assert [rank.group for rank in merge([TOLD, other, away], Services())] == ["g", "g", ""]
    assert [rank.group for rank in merge([TOLD, other, third], Services())] == ["g", "", "h"]


@pytest.mark.parametrize(
    ("ranks", "unit", "expected"),
    [
        ([TOLD], UNIT, False),
        ([replace(TOLD, pid=6)], UNIT, True),
        ([replace(TOLD, pid=6)], replace(UNIT, active="activating", main_pid=0), True),
        ([replace(TOLD, pid=6)], replace(UNIT, active="inactive", main_pid=0), False),
        ([], UNIT, True),
        ([], replace(UNIT, active="activating"), False),
    ],
)
def test_a_restart_while_looking_is_noticed(ranks, unit, expected):
    assert disagree(ranks, Services(ranks={"CPU-0": unit})) is expected


def test_units_of_a_group():
    assert group_units("a-b") == [
        "preloadd-group@a-b.target",
        "preloadd-gate@a-b.service",
        "preloadd-down@a-b.service",
    ]
    with pytest.raises(ConfigError, match="part of a unit's name"):
        group_units("a b")
