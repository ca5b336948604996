import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.files import FileIdentity
from preloadd.domain.key import (
    ABSENT,
    CHECKPOINT,
    MAX_ENTRIES,
    MAX_TABLE,
    Difference,
    canonical,
    differences,
    digest_method,
    table,
)

ONE = FileIdentity(1, 2, 3, 4, 5)
TWO = FileIdentity(1, 3, 3, 4, 5)
KEY = {CHECKPOINT: "sampled-1:aa", "dtype": "bfloat16"}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (10000.0, 10000),
        ({"rope_theta": 1e6, "a": [1.0]}, {"a": [1], "rope_theta": 1000000}),
        ((1, 2), [1, 2]),
        ({"b", "a"}, ["a", "b"]),
    ],
)
def test_what_means_the_same_is_written_the_same(one, other):
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"), [(10000.5, 10000), ({"a": 1}, {"a": 2}), (True, 1), ([1, 2], [2, 1])]
)
def test_what_differs_is_written_differently(one, other):
    assert canonical(one) != canonical(other)


def test_numbers_that_json_lacks_are_written_nevertheless():
    # Configurations in the wild hold them.
    assert canonical({"limit": math.inf}) == '{"limit":Infinity}'


@given(st.dictionaries(st.text(), json_values))
def test_the_order_of_fields_does_not_matter(value):
    assert canonical(value) == canonical(dict(reversed(value.items())))


def test_equal_keys_match():
    assert differences(KEY, dict(KEY)) == ()


def test_each_differing_field_is_told_with_both_values():
    other = KEY | {"dtype": "float16", CHECKPOINT: "sampled-1:bb"}
    assert differences(KEY, other) == (
        Difference(CHECKPOINT, "sampled-1:aa", "sampled-1:bb"),
        Difference("dtype", "bfloat16", "float16"),
    )


def test_a_field_that_one_side_lacks_is_a_difference():
    assert differences(KEY | {"new": "x"}, KEY) == (Difference("new", "x", ABSENT),)
    assert differences(KEY, KEY | {"new": "x"}) == (Difference("new", ABSENT, "x"),)


def test_the_very_same_files_stand_for_equal_content():
    unread = KEY | {CHECKPOINT: ""}
    assert differences(KEY, unread, daemon_files=[ONE, TWO], engine_files=[TWO, ONE]) == ()


@pytest.mark.parametrize("files", [([], []), ([ONE], [TWO]), ([ONE], []), ([ONE, TWO], [ONE])])
def test_unread_content_never_matches_without_the_very_same_files(files):
    theirs, ours = files
    unread = KEY | {CHECKPOINT: ""}
    assert [d.field for d in differences(KEY, unread, daemon_files=theirs, engine_files=ours)] == [
        CHECKPOINT
    ]


def test_two_unread_contents_do_not_match():
    unread = KEY | {CHECKPOINT: ""}
    assert [d.field for d in differences(unread, unread)] == [CHECKPOINT]


def test_the_same_files_excuse_no_other_field():
    other = KEY | {"dtype": "float16"}
    found = differences(KEY, other, daemon_files=[ONE], engine_files=[ONE])
    assert [d.field for d in found] == ["dtype"]


def test_the_method_of_a_digest_is_read_off_its_text():
    assert digest_method("full-1:00ff") == "full-1"
    assert digest_method("") == ""


# ---- fields that are tables


def apart(daemon, engine):
    found = differences({"t": table(daemon)}, {"t": table(engine)})
    return [(d.field, d.daemon, d.engine) for d in found]


@pytest.mark.parametrize(
    ("daemon", "engine", "told"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, [("t.b", "2", "3")]),
        ({"a": 1.0}, {"a": 1}, []),
        ({"a": "x"}, {"a": None}, [("t.a", "x", "null")]),
        ({"a": 1}, {}, [("t.a", "1", ABSENT)]),
        ({}, {"text": {"b": [1]}}, [("t.text", ABSENT, '{"b":[1]}')]),
        ({"text": {"b": [1], "c": 0}}, {"text": {"b": [2], "c": 0}}, [("t.text.b", "[1]", "[2]")]),
        ({"text": {"b": 1}}, {"text": 1}, [("t.text", '{"b":1}', "1")]),
    ],
)
def test_of_two_tables_the_entries_that_differ_are_told(daemon, engine, told):
    assert apart(daemon, engine) == told


def test_what_is_long_in_a_table_is_told_by_its_digest():
    ((field, daemon, engine),) = apart({"a": "x" * 999, "b": 1}, {"a": "x" * 998 + "y", "b": 1})
    assert field == "t.a"
    assert daemon.startswith("blake2b:")
    assert engine.startswith("blake2b:")
    assert daemon != engine
    layers = {f"layers.{number}": {"bits": 4} for number in range(MAX_ENTRIES + 1)}
    other = layers | {"layers.7": {"bits": 8}}
    assert [field for field, *_ in apart({"layers": layers}, {"layers": other})] == ["t.layers"]


def test_a_table_is_never_longer_than_what_fits_into_a_packet():
    much = {f"name-{number}": "x" * 150 for number in range(MAX_ENTRIES)}
    other = much | {"name-7": "y"}
    assert len(table(much)) <= MAX_TABLE
    assert [field for field, *_ in apart(much, other)] == ["t"]


def test_of_many_entries_that_differ_some_are_told_and_the_rest_counted():
    told = apart({f"{n:02}": 1 for n in range(20)}, {f"{n:02}": 2 for n in range(20)})
    assert len(told) == 9
    assert told[0] == ("t.00", "1", "2")
    assert told[-1] == ("t.*", "12 more entries", "other ones")


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1',
        "{}}",
        '{"a":' * 100_000,
        '{"a":' * 900 + "1" + "}" * 900,
        '{"a":"\\ud800"}',
        '{"\\uD800":1}',
        '{"a":NaN, "a":2}',
        "[1]",
        "text",
    ],
)
def test_whatever_a_peer_sends_is_told_as_text(text):
    found = differences({"t": '{"a":0}'}, {"t": text})
    assert found
    for difference in found:
        assert difference.field.startswith("t")
        f"{difference}".encode()


def test_tables_that_are_written_differently_but_mean_the_same_still_differ():
    assert differences({"t": '{"a":1}'}, {"t": '{"a": 1}'}) == (
        Difference("t", '{"a":1}', '{"a": 1}'),
    )


@given(st.dictionaries(st.text(), json_values), st.dictionaries(st.text(), json_values))
def test_tables_differ_exactly_if_their_entries_do(one, other):
    assert bool(apart(one, other)) == (table(one) != table(other))
