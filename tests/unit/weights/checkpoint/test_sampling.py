from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from preloadd.weights.checkpoint import TensorInfo
from preloadd.weights.checkpoint.sampling import SAMPLE, WINDOW, WINDOWS, windows


def tensor(nbytes: int, name: str = "model.norm", start: int = 100) -> TensorInfo:
    return TensorInfo(name, "U8", (nbytes,), start, start + nbytes)


@given(st.integers(0, SAMPLE))
def test_a_small_tensor_is_read_whole(nbytes: int) -> None:
    assert windows(tensor(nbytes)) == [(100, nbytes)]


@given(st.integers(SAMPLE + 1, 1 << 40), st.text(st.characters(exclude_categories=["Cs"])))
def test_a_large_tensor_is_read_at_head_tail_and_between(nbytes: int, name: str) -> None:
    found = windows(tensor(nbytes, name))
    assert len(found) == WINDOWS
    assert {size for _, size in found} == {WINDOW}
    places = [place for place, _ in found]
    assert places[0] == 100
    assert places[-1] == 100 + nbytes - WINDOW
    assert places == sorted(places)


@given(st.integers(64 * SAMPLE, 1 << 40))
def test_every_stretch_has_a_window(nbytes: int) -> None:
    places = [place - 100 for place, _ in windows(tensor(nbytes))]
    assert max(b - a for a, b in itertools.pairwise(places)) <= nbytes * 2 / 6 + WINDOW


def test_places_depend_on_name_and_size_but_not_on_where_the_tensor_lies() -> None:
    base = windows(tensor(1 << 30))
    assert windows(tensor(1 << 30, start=0)) == [(place - 100, size) for place, size in base]
    assert windows(tensor(1 << 30, name="model.Norm"))[1:-1] != base[1:-1]
    assert windows(tensor((1 << 30) + 1))[1:-1] != base[1:-1]


def test_the_places_are_part_of_the_method() -> None:
    assert windows(tensor(1 << 20, "lm_head.weight", 0)) == [
        (place, WINDOW)
        for place in (0, 99_708, 219_589, 503_481, 567_397, 736_163, 898_374, 1_044_480)
    ]
