import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.strict_json import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_NBYTES,
    Malformed,
    decode,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_read(value):
    assert decode(json.dumps(value).encode()) == value


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(raw):
    with suppress(Malformed):
        decode(raw)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "no JSON"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ("{}".encode("utf-16"), "no UTF-8 from byte 0 on"),
        (b'{"a": "\xff"}', "no UTF-8 from byte 7 on"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "beyond"),
        (b"[" + b"9" * 5000 + b"]", "an integer of 5,000 digits"),
        (b"[" * 60_000, "nested deeper"),
        (b"[" * 60_000 + b"]" * 60_000, "nested deeper"),
        (b"[[]," * MAX_CONTAINERS, "lists and objects"),
        (b" " * (MAX_NBYTES + 1), "bytes"),
    ],
)
def test_refused(raw, why):
    with pytest.raises(Malformed, match=why):
        decode(raw)


def test_bounds_are_where_they_are_said_to_be():
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert decode(deep)
    with pytest.raises(Malformed, match=f"deeper than {MAX_DEPTH} levels"):
        decode(b"[" + deep + b"]")
    assert decode(b"9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert decode(b"1" + b" " * (MAX_NBYTES - 1)) == 1


def test_another_limit_of_bytes():
    assert decode(b"[1]", 3) == [1]
    with pytest.raises(Malformed, match="more than 2 bytes"):
        decode(b"[1]", 2)
