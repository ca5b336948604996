import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.cli.words import duration, harmless


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.05, "0.05 s"), (59.9, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (90000, "1 d 1 h")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@given(st.text())
def test_harmless_text_is_one_printable_line(text):
    assert harmless(text).isprintable()


def test_harmless_keeps_what_can_be_read():
    assert harmless(" größer\n\n  drei ✓ \x1b[1m") == "größer; drei ✓ \N{REPLACEMENT CHARACTER}[1m"
