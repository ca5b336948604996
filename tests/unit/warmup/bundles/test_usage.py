from typing import ClassVar

import pytest

from preloadd.warmup.bundles.usage import Stamp, Use, Verdict, compiled, judge

OURS, OTHER, OLD = "torch_compile_cache/0123456789", "torch_compile_cache/9876543210", "old"


def stamp(number):
    return Stamp(number, 10, number)


BEFORE = {OURS: {"model": stamp(1), "a.so": stamp(2)}, OLD: {"x": stamp(3)}}


class Cases:
    NOTHING: ClassVar = BEFORE
    LOCKED: ClassVar = {**BEFORE, OURS: {**BEFORE[OURS], "new.so": stamp(4)}}
    ANEW: ClassVar = {**BEFORE, OURS: {**BEFORE[OURS], "model": stamp(5)}}
    ANEW_AND_MORE: ClassVar = {**ANEW, OURS: {**ANEW[OURS], "new.so": stamp(4)}}
    FEWER: ClassVar = {**BEFORE, OURS: {"model": stamp(1)}}
    BESIDE: ClassVar = {**BEFORE, OTHER: {"model": stamp(6)}}
    BOTH: ClassVar = {**LOCKED, OTHER: {"model": stamp(6)}}
    OLD_ONE_GREW: ClassVar = {**BEFORE, OLD: {"x": stamp(3), "y": stamp(7)}}
    GONE: ClassVar = {OLD: BEFORE[OLD]}


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (Cases.NOTHING, Verdict(Use.UNTOUCHED)),
        (Cases.LOCKED, Verdict(Use.USED, (OURS,))),
        (Cases.ANEW, Verdict(Use.REPLACED, (OURS,))),
        (Cases.ANEW_AND_MORE, Verdict(Use.REPLACED, (OURS,))),
        (Cases.FEWER, Verdict(Use.REPLACED, (OURS,))),
        (Cases.BESIDE, Verdict(Use.BYPASSED, (OTHER,))),
        (Cases.BOTH, Verdict(Use.USED, (OURS,))),
        (Cases.OLD_ONE_GREW, Verdict(Use.UNTOUCHED)),
        (Cases.GONE, Verdict(Use.REMOVED, (OURS,))),
    ],
)
def test_what_engines_left_tells_how_it_is_used(after, verdict):
    assert judge([OURS], BEFORE, after) == verdict


def test_of_several_folders_one_that_was_refused_is_told():
    both = {**BEFORE, OTHER: {"model": stamp(6)}}
    after = {**both, OTHER: {"model": stamp(7)}, OURS: {**BEFORE[OURS], "new": stamp(8)}}
    assert judge([OURS, OTHER], both, after) == Verdict(Use.REPLACED, (OTHER,))


@pytest.mark.parametrize("use", Use)
def test_a_line_is_told_where_something_is_wrong(use):
    line = Verdict(use, (OURS,)).line
    assert bool(line) == (use not in (Use.UNTOUCHED, Use.USED))
    assert not line or OURS in line


@pytest.mark.parametrize(
    ("after", "folders"),
    [
        (Cases.NOTHING, ()),
        (Cases.ANEW, (OURS,)),
        (Cases.BESIDE, (OTHER,)),
        (Cases.BOTH, (OURS, OTHER)),
        (Cases.OLD_ONE_GREW, (OLD,)),
        (Cases.GONE, ()),
    ],
)
def test_in_which_folders_engines_compiled_is_told(after, folders):
    assert compiled(BEFORE, after) == folders


def test_at_first_all_are_new():
    assert compiled({}, BEFORE) == (OLD, OURS)
