import math

import pytest
import yaml as reference
from hypothesis import given
from hypothesis import strategies as st

from preloadd.cli.yaml import dump

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(
        ["yes", "No", "on", "null", "~", "1e3", "0x1f", "1:30", "2024-01-01", "- a", "#"]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_read_back(value):
    # Half of a surrogate pair is in no YAML document.
    text = dump(value)
    assert reference.safe_load(text) == value


def test_not_a_number_is_read_back():
    assert math.isnan(reference.safe_load(dump(float("nan"))))


def test_shape():
    value = {"a": [{"b": 1, "c": []}, "x y"], "d": {}, "e": None, "f": True, "g": 1e20}
    assert dump(value) == (
        'a:\n  - b: 1\n    c: []\n  - "x y"\nd: {}\ne: null\nf: true\ng: 1.0e+20\n'
    )


@pytest.mark.parametrize("value", [object(), {1: 2}, [b"x"], {"a": {1}}])
def test_what_has_no_form_is_refused(value):
    with pytest.raises(TypeError, match=r"no form|must be text"):
        dump(value)
