import pytest

from preloadd.warmup.merge import Existing, TableConflict, merge, settle
from preloadd.warmup.table import Entry, Table


@pytest.fixture
def old(metadata):
    return Table({"a": Entry("R", 1), "b": Entry("R", 2)}, metadata, {"p": {"x": 1}, "q": {}})


@pytest.fixture
def new(metadata):
    return Table({"b": Entry("S", 3), "c": Entry("R", 4)}, metadata, {"p": {"y": 2}})


def test_new_entries_win_and_old_ones_stay(old, new):
    both = merge(old, new)
    assert both.entries == {"a": Entry("R", 1), "b": Entry("S", 3), "c": Entry("R", 4)}
    assert both.records == {"p": {"y": 2}, "q": {}}


def test_metadata_stay_as_they_were(old, new, metadata):
    old = Table(old.entries, metadata | {"gpu": "*", "extra": "x"})
    assert merge(old, new).metadata == old.metadata
    assert merge(Table(old.entries), new).metadata == metadata


def test_nothing_is_kept_of_a_table_that_does_not_know_where_it_was_tuned(new, metadata):
    soft = Table({"a": Entry("R", 1)}, metadata | {"gpu": "unknown"})
    assert merge(soft, new) is new


@pytest.mark.parametrize("existing", Existing)
def test_another_environment_is_never_overwritten(old, new, metadata, existing):
    other = Table(new.entries, metadata | {"gpu": "NVIDIA B200"})
    with pytest.raises(TableConflict, match=r"t.json was tuned .*H200.*B200.*remove it"):
        settle(old, other, existing, "t.json")
    with pytest.raises(ValueError, match="B200"):
        merge(old, other)


def test_what_becomes_of_one_that_is_there(old, new):
    with pytest.raises(TableConflict, match=r"t\.json is there already.*--merge.*--replace"):
        settle(old, new, Existing.KEEP, "t.json")
    assert settle(old, new, Existing.REPLACE, "t.json") is new
    assert settle(old, new, Existing.MERGE, "t.json") == merge(old, new)


@pytest.mark.parametrize("existing", Existing)
def test_one_that_does_not_know_where_it_was_tuned_is_replaced(new, metadata, existing):
    soft = Table({"a": Entry("R", 1)}, metadata | {"gpu": "unknown"})
    assert settle(soft, new, existing, "t.json") is new


def test_remarks_beside_the_fields_decide_nothing(old, new, metadata):
    new = Table(new.entries, metadata | {"remark": "x"})
    with pytest.raises(TableConflict, match="is there already"):
        settle(old, new, Existing.KEEP, "t.json")
    assert set(merge(old, new).entries) == {"a", "b", "c"}


@pytest.mark.parametrize("existing", Existing)
def test_the_same_may_always_stay(old, existing):
    again = Table(old.entries, old.metadata, old.records, "other digest")
    assert settle(old, again, existing, "t.json") is old
