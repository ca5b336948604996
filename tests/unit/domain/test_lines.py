import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.lines import one_line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/mödel 1", "/srv/mödel 1"),
        ("/srv/a\nb", "/srv/a\\nb"),
        ("/srv/\x1b[2J", "/srv/\\x1b[2J"),
        ("/srv/\udcff", "/srv/\\udcff"),
        ("a\u2028b", "a\\u2028b"),
    ],
)
def test_what_would_break_a_line_is_escaped(text, told):
    assert one_line(text) == told


@given(st.text(st.characters(exclude_categories=())))
def test_one_line_is_one_line_that_can_be_written(text):
    told = one_line(text)
    assert len(told.splitlines()) <= 1
    told.encode()
