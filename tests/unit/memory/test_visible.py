"""What others have chosen, in a line of ours."""

from __future__ import annotations

import pytest

from preloadd.memory.visible import MOST, brief, hint


@pytest.mark.parametrize("text", ["\udcff\udc80", "a\nb\x1b[31m", "0," * 50_000, ""])
def test_a_text_becomes_one_short_line_that_can_be_encoded(text: str) -> None:
    told = brief(text)
    assert told.isprintable()
    assert len(told.encode()) <= MOST + 3
    assert (told == "") is (text == "")


def test_a_variable_is_told_if_it_is_set() -> None:
    assert hint("X", {"X": "0,1"}) == "X=0,1"
    assert hint("X", {"X": ""}) == "X="
    assert hint("X", {}) == ""
    assert hint("X", {"X": "\udcff"}) == "X=\\udcff"
