import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.files import FileIdentity
from preloadd.domain.key import (
    ABSENT,
    CHECKPOINT,
    Difference,
    canonical,
    differences,
    digest_method,
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
