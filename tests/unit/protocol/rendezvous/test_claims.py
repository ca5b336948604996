import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.key import OWN_PLACE
from preloadd.domain.placement import Parallel, place
from preloadd.frameworks.identity import place_fields
from preloadd.protocol.rendezvous.claims import disagreement, shared
from preloadd.protocol.rendezvous.messages import Join
from preloadd.protocol.rendezvous.wording import printable
from tests.unit.protocol.rendezvous.ranks import WILD, join

JOIN = join(3, key={"checkpoint": "full:00ff", "dtype": "float16", "model_config": '{"a":{"b":1}}'})


def other(**changes) -> Join:
    return msgspec.structs.replace(JOIN, rank=0, node=0, **changes)


def test_equal_claims_agree():
    assert disagreement(JOIN, other()) == ""


def test_a_disagreement_names_both_ranks_the_field_and_both_values():
    told = disagreement(JOIN, other(key={**JOIN.key, "dtype": "bfloat16"}))
    assert told == ("dtype is 'float16' for rank 3 of node 1 but 'bfloat16' for rank 0 of node 0")


@pytest.mark.parametrize("field", ["preloadd", "role", "builder"])
def test_claims_beside_the_key_count(field):
    told = disagreement(JOIN, other(**{field: "another"}))
    assert told.startswith(f"{field} is ")
    assert "'another' for rank 0" in told


def test_a_draft_that_only_one_has_beside_it_is_a_disagreement():
    told = disagreement(JOIN, other(drafts=True))
    assert told == "draft is 'not held' for rank 3 of node 1 but 'held' for rank 0 of node 0"


def test_how_long_one_waits_for_the_others_is_its_own_matter():
    assert disagreement(JOIN, other(silence=3.0)) == ""


def test_entries_of_tables_are_told_one_by_one():
    changed = {**JOIN.key, "model_config": '{"a":{"b":2}}'}
    assert disagreement(JOIN, other(key=changed)).startswith("model_config.a.b is '1' for rank 3")


def test_a_field_that_one_lacks_is_told():
    told = disagreement(JOIN, other(key={**JOIN.key, "more": "1"}))
    assert "more is '(absent)' for rank 3 of node 1 but '1'" in told


def test_many_or_long_or_ugly_differences_stay_readable():
    many = {f"f{n:02}\x1b\n": "x" * 5000 for n in range(40)}
    told = disagreement(JOIN, other(key={**JOIN.key, **many}))
    assert told.isprintable()
    assert told.endswith("and 32 more")
    assert len(told) < 4000


@given(st.dictionaries(st.text(), st.text() | WILD.map(json.dumps), max_size=4))
def test_whatever_is_claimed_can_be_compared(key):
    told = disagreement(JOIN, other(key=key))
    assert told
    assert printable(told).isprintable()


def test_the_fields_of_a_place_are_those_in_which_ranks_of_one_group_differ():
    parallel = Parallel(tensor=2, pipeline=2, data=2, expert=True)
    first, last = (place_fields(place(parallel, rank)) for rank in (0, parallel.world - 1))
    assert {name for name in first if first[name] != last[name]} == OWN_PLACE


def test_what_is_claimed_of_a_key_fits_a_frame_and_is_without_the_place():
    assert shared(JOIN.key | {"tp_rank": "3", "tp_size": "4"}) == JOIN.key | {"tp_size": "4"}
    large = shared({f"table{n}": "ä" * 8000 for n in range(8)})
    assert all(value.startswith("blake2b:") for value in large.values())
