from dataclasses import replace

import pytest

from preloadd.cli.exits import CommandFailed, Exit
from preloadd.cli.overview import (
    Condition,
    Holder,
    Managed,
    Rank,
    complaints,
    holders,
    overview,
    remembering,
    select,
    with_rates,
)

RANK = Rank("CPU-0", Condition.SERVING, group="g", socket="/0", lease_count=0)
DOWN = replace(RANK, instance="CPU-1", condition=Condition.STOPPED, socket="/1", lease_count=None)
MANAGED = {"g": Managed("preloadd-group@g.target", "active", ("CPU-1", "CPU-0"))}


def test_groups_of_systemd_come_first_and_in_the_order_of_their_ranks():
    other = replace(RANK, group="a", socket="/2")
    seen = overview([other, RANK, DOWN], MANAGED)
    assert [group.name for group in seen.groups] == ["g", "a"]
    assert [rank.instance for rank in seen.groups[0].ranks] == ["CPU-1", "CPU-0"]
    assert seen.groups[0].target == "preloadd-group@g.target"


@pytest.mark.parametrize(
    ("ranks", "managed", "status"),
    [
        ([RANK], {}, Exit.DONE),
        ([RANK, DOWN], {}, Exit.NOT_SERVING),
        ([RANK, replace(RANK, divided="CPU-0 has other files")], {}, Exit.NOT_SERVING),
        ([], MANAGED, Exit.NOT_SERVING),
        ([], {}, Exit.NOTHING_THERE),
    ],
)
def test_exit_status(ranks, managed, status):
    assert overview(ranks, managed).exit_status is status


def test_select_judges_only_what_was_selected():
    seen = overview([RANK, replace(DOWN, group="h")], {})
    assert select(seen, []) is seen
    assert select(seen, ["g"]).healthy
    assert not select(seen, ["h", "g", "h"]).healthy
    with pytest.raises(CommandFailed, match="no group x here: there are g, h") as caught:
        select(seen, ["x"])
    assert caught.value.exit_status == 66


@pytest.mark.parametrize(
    ("rank", "in_use"),
    [
        (RANK, False),
        (replace(RANK, lease_count=2), True),
        (DOWN, False),
        (replace(DOWN, condition=Condition.STUCK), None),
        (replace(DOWN, condition=Condition.DENIED), None),
        (replace(DOWN, condition=Condition.ABSENT), False),
        (replace(DOWN, condition=Condition.ABSENT, active="activating"), None),
        (replace(DOWN, condition=Condition.FAILED, active="failed"), False),
    ],
)
def test_whether_weights_are_in_use_is_never_guessed(rank, in_use):
    assert rank.in_use is in_use


def test_complaints():
    managed = {**MANAGED, "empty": Managed("t", "active")}
    seen = overview([RANK, replace(DOWN, detail="why")], managed)
    assert complaints(seen) == [
        "empty: it has no ranks: see `preloadctl config check`",
        "g CPU-1: stopped: why",
    ]
    divided = replace(RANK, divided="of two checkpoints", detail="of two checkpoints")
    assert complaints(overview([divided], {})) == ["g CPU-0: divided: of two checkpoints"]


def test_holders_are_processes_not_leases():
    leases = tuple(Holder(f"e{n}", n, "copy", "") for n in range(7))
    ranks = [replace(RANK, leases=leases), replace(RANK, leases=leases)]
    assert holders(ranks, most=2) == "e0 (pid 0), e1 (pid 1) and 5 more"


def test_holders_that_a_rank_does_not_name_are_counted():
    named = replace(RANK, leases=(Holder("e", 5, "copy", ""),), lease_count=2)
    silent = replace(RANK, instance="CPU-1", lease_count=3)
    assert holders([named, silent, RANK]) == "e (pid 5), 3 that CPU-1 does not name"


def test_a_rank_that_tells_no_group_any_more_is_still_of_the_one_that_it_told():
    silent = replace(RANK, group="", condition=Condition.STUCK)
    other = replace(silent, instance="CPU-2", socket="/2")
    seen = remembering(overview([silent, other, DOWN], MANAGED), "h", {"/0"})
    assert {group.name: len(group.ranks) for group in seen.groups} == {"g": 1, "": 1, "h": 1}
    assert seen.groups[0].target == "preloadd-group@g.target"


def test_rates_are_of_loads_alone():
    loading = replace(RANK, condition=Condition.LOADING, total=100, done=10)
    seen = overview([loading, DOWN], {})
    rated = with_rates(seen, [loading], [replace(loading, done=30)], 2.0)
    assert [rank.rate for rank in rated.ranks] == [10.0, 0.0]
    # A load that was begun anew has done less.
    assert with_rates(seen, [loading], [replace(loading, done=5)], 2.0).ranks[0].rate == 0.0


def test_a_rate_is_of_one_phase_of_a_load():
    loading = replace(RANK, condition=Condition.LOADING, phase="loading", total=100, done=10)
    seen = overview([loading], {})
    storing = replace(loading, phase="storing", done=90)
    assert with_rates(seen, [loading], [storing], 2.0).ranks[0].rate == 0.0
    assert with_rates(seen, [storing], [replace(storing, done=94)], 2.0).ranks[0].rate == 2.0
