import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.key import OWN_PLACE
from preloadd.domain.placement import Parallel, place
from preloadd.errors import ProtocolViolation
from preloadd.frameworks.identity import place_fields
from preloadd.protocol import rendezvous as r

JOIN = r.Join(
    preloadd="1.0",
    group="llama",
    role="target",
    builder="native",
    world=4,
    rank=3,
    node=1,
    nodes=2,
    key={"checkpoint": "full:00ff", "dtype": "float16", "model_config": '{"a":{"b":1}}'},
)
FROM_MEMBER = [JOIN, r.Beat(), r.Done(), r.Failed(why="it is gone")]
FROM_CONVENER = [r.Beat(missing=(1, 3)), r.Agreed(), r.Ended(why="nö")]


def frame(message) -> bytes:
    (found,) = r.Frames().receive(r.encode(message))
    return found


@pytest.mark.parametrize("message", FROM_MEMBER)
def test_what_a_member_says_arrives(message):
    assert r.decode_from_member(frame(message)) == message


@pytest.mark.parametrize("message", FROM_CONVENER)
def test_what_rank_0_says_arrives(message):
    assert r.decode_from_convener(frame(message)) == message


def test_sides_are_not_confused():
    with pytest.raises(ProtocolViolation):
        r.decode_from_convener(frame(JOIN))
    with pytest.raises(ProtocolViolation):
        r.decode_from_member(frame(r.Agreed()))


@given(st.data())
def test_frames_come_out_whole_however_they_are_cut(data):
    stream = b"".join(map(r.encode, FROM_MEMBER))
    cuts = data.draw(st.lists(st.integers(0, len(stream))).map(sorted))
    frames, found = r.Frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += frames.receive(stream[start:end])
    assert [r.decode_from_member(each) for each in found] == FROM_MEMBER


@pytest.mark.parametrize("nbytes", [0, r.MAX_FRAME + 1, 0x47455420])
def test_a_length_that_no_rank_sends_is_refused_at_once(nbytes):
    with pytest.raises(ProtocolViolation, match="no preloadd rank"):
        r.Frames().receive(nbytes.to_bytes(4, "big"))


@given(st.binary(max_size=200))
def test_garbage_is_a_violation_and_nothing_else(data):
    for decode in (r.decode_from_member, r.decode_from_convener):
        with suppress(ProtocolViolation):
            decode(data)


WILD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(["join", "beat", "done", "failed"]), st.dictionaries(st.text(), WILD))
def test_wild_fields_are_a_violation_or_a_message(tag, fields):
    body = msgspec.msgpack.encode({**fields, "type": tag})
    with suppress(ProtocolViolation):
        r.decode_from_member(body)


def test_numbers_and_texts_are_bounded():
    for change in ({"rank": -1}, {"rank": r.MAX_WORLD + 1}, {"group": "g" * 257}):
        with pytest.raises(ProtocolViolation):
            r.decode_from_member(frame(msgspec.structs.replace(JOIN, **change)))
    r.encode(r.Beat(missing=tuple(range(r.MAX_WORLD))))
    with pytest.raises(ProtocolViolation, match="65,536"):
        r.encode(msgspec.structs.replace(JOIN, key={"rope": "x" * r.MAX_FRAME}))
    with pytest.raises(ProtocolViolation, match="Unicode"):
        r.encode(r.Failed(why="\ud800"))


def test_deep_nesting_is_a_violation():
    with pytest.raises(ProtocolViolation):
        r.decode_from_member(b"\x81\xa1x" + b"\x91" * 50_000)


# -- claims --


def other(**changes) -> r.Join:
    return msgspec.structs.replace(JOIN, rank=0, node=0, **changes)


def test_equal_claims_agree():
    assert r.disagreement(JOIN, other()) == ""


def test_a_disagreement_names_both_ranks_the_field_and_both_values():
    told = r.disagreement(JOIN, other(key={**JOIN.key, "dtype": "bfloat16"}))
    assert told == ("dtype is 'float16' for rank 3 of node 1 but 'bfloat16' for rank 0 of node 0")


@pytest.mark.parametrize("field", ["preloadd", "role", "builder"])
def test_claims_beside_the_key_count(field):
    told = r.disagreement(JOIN, other(**{field: "another"}))
    assert told.startswith(f"{field} is ")
    assert "'another' for rank 0" in told


def test_a_draft_that_only_one_has_beside_it_is_a_disagreement():
    told = r.disagreement(JOIN, other(drafts=True))
    assert told == "draft is 'not held' for rank 3 of node 1 but 'held' for rank 0 of node 0"


def test_how_long_one_waits_for_the_others_is_its_own_matter():
    assert r.disagreement(JOIN, other(silence=3.0)) == ""
    for never in (0.0, -1.0, float("nan")):
        with pytest.raises(ProtocolViolation):
            r.decode_from_member(frame(other(silence=never)))


def test_entries_of_tables_are_told_one_by_one():
    changed = {**JOIN.key, "model_config": '{"a":{"b":2}}'}
    assert r.disagreement(JOIN, other(key=changed)).startswith("model_config.a.b is '1' for rank 3")


def test_a_field_that_one_lacks_is_told():
    told = r.disagreement(JOIN, other(key={**JOIN.key, "more": "1"}))
    assert "more is '(absent)' for rank 3 of node 1 but '1'" in told


def test_many_or_long_or_ugly_differences_stay_readable():
    many = {f"f{n:02}\x1b\n": "x" * 5000 for n in range(40)}
    told = r.disagreement(JOIN, other(key={**JOIN.key, **many}))
    assert told.isprintable()
    assert told.endswith("and 32 more")
    assert len(told) < 4000


@given(st.dictionaries(st.text(), st.text() | WILD.map(json.dumps), max_size=4))
def test_whatever_is_claimed_can_be_compared(key):
    told = r.disagreement(JOIN, other(key=key))
    assert told
    assert r.printable(told).isprintable()


def test_the_fields_of_a_place_are_those_in_which_ranks_of_one_group_differ():
    parallel = Parallel(tensor=2, pipeline=2, data=2, expert=True)
    first, last = (place_fields(place(parallel, rank)) for rank in (0, parallel.world - 1))
    assert {name for name in first if first[name] != last[name]} == OWN_PLACE


def test_ranks_and_nodes_are_counted_out():
    assert r.ranks_named([3, 5], [1, 2, 1]) == "ranks 3, 5 of nodes 1, 2"
    assert r.ranks_named([3], [1]) == "rank 3 of node 1"
    assert r.ranks_named([3], [], "draft") == "draft rank 3"
    assert str(other(role="draft")) == "draft rank 0 of node 0"
    assert r.ranks_named(range(20), [0]).startswith("ranks 0, 1")
    assert "15, …" in r.ranks_named(range(20), [0])
