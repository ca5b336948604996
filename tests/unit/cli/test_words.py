import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.cli.words import duration, harmless, percent, size


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_size(nbytes, text):
    assert size(nbytes) == text


def test_percent_is_complete_only_when_all_is_done():
    assert [percent(999, 1000), percent(1000, 1000), percent(5, 0)] == ["99%", "100%", ""]


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
