from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.loader.pieces import APART, MAX_PARTS, Part, Piece, pieces
from preloadd.memory.api import PIECE, Rows
from preloadd.weights.plan import Run


def whole(offset, nbytes, file=0):
    return Run(file, offset, nbytes, 1, nbytes)


@st.composite
def placed(draw):
    """Runs as a plan places them: one after the other in the arena, with padding now and then."""
    runs, target, end = [], draw(st.integers(0, 700)), draw(st.integers(0, 700))
    for _ in range(draw(st.integers(0, 12))):
        rows = draw(st.integers(1, 6))
        row = draw(st.integers(1, 900))
        gap = draw(st.sampled_from([0, 1, 300, APART - 1, APART, APART + 5]))
        offset = end + draw(st.sampled_from([0, 0, 0, 40]))
        stride = row + gap if rows > 1 else row
        run = Run(draw(st.sampled_from([0, 0, 0, 1])), offset, row, rows, stride)
        target += draw(st.sampled_from([0, 0, 1, 511, 512, 5000]))
        runs.append((run, target))
        target += run.nbytes
        end = offset + (rows - 1) * stride + row
    return runs


def bytes_of(run, target):
    """Ends of every row: (file, offset) -> place in the chunk."""
    for row in range(run.rows):
        for byte in (0, run.row_nbytes - 1):
            place = target + row * run.row_nbytes + byte
            yield place, (run.file, run.offset + row * run.stride + byte)


def brought(piece):
    """The same of a piece, for every byte."""
    parts = piece.parts or [
        Part(row * piece.rows.stride, piece.rows.nbytes, row * piece.rows.nbytes)
        for row in range(piece.rows.count)
    ]
    for part in parts:
        assert part.start + part.nbytes <= piece.span
        assert part.place + part.nbytes <= piece.rows.total
        for byte in range(part.nbytes):
            yield piece.target + part.place + byte, (piece.file, piece.offset + part.start + byte)


@given(placed(), st.integers(1, 5000))
def test_pieces_bring_every_byte_to_its_place_once(runs, piece):
    cut = list(pieces(runs, piece))
    found = [pair for each in cut for pair in brought(each)]
    assert len(dict(found)) == len(found) == sum(run.nbytes for run, _ in runs)
    assert {pair for run, target in runs for pair in bytes_of(run, target)} <= set(found)


@given(placed(), st.integers(1, 5000))
def test_pieces_are_bounded_and_in_order(runs, piece):
    cut = list(pieces(runs, piece))
    for each in cut:
        assert 0 < each.span <= piece
        assert 0 < each.rows.total <= piece
        assert each.rows.skip == 0
        assert each.whole or not each.parts
        assert all(part.start <= part.place for part in each.parts)
    assert all(before.target < after.target for before, after in pairwise(cut))


def test_a_long_run_is_cut_into_full_pieces():
    run = whole(7, 2 * PIECE + 5)
    assert list(pieces([(run, 512)])) == [
        Piece(0, 7, PIECE, 512, Rows(0, PIECE)),
        Piece(0, 7 + PIECE, PIECE, 512 + PIECE, Rows(0, PIECE)),
        Piece(0, 7 + 2 * PIECE, 5, 512 + 2 * PIECE, Rows(0, 5)),
    ]


def test_neighbours_in_file_and_arena_are_one_piece_up_to_its_size():
    runs = [(whole(1000 + 512 * n, 512), 512 * n) for n in range(1000)]
    assert list(pieces(runs)) == [Piece(0, 1000, 512_000, 0, Rows(0, 512_000))]
    assert [each.span for each in pieces(runs, 200_000)] == [200_000, 200_000, 112_000]


def test_padding_in_the_arena_is_bridged():
    runs = [(whole(100, 600), 0), (whole(700, 4), 1024), (whole(704, 512), 1536)]
    (piece,) = pieces(runs)
    assert piece == Piece(
        0, 100, 1116, 0, Rows(0, 2048), (Part(0, 600, 0), Part(600, 4, 1024), Part(604, 512, 1536))
    )
    assert piece.whole


@pytest.mark.parametrize(
    "other",
    [(whole(701, 4), 1024), (whole(700, 4, file=1), 1024), (whole(700, 4), 2048), (whole(0, 4), 0)],
    ids=["a hole in the file", "another file", "far in the arena", "backwards"],
)
def test_what_does_not_follow_is_read_on_its_own(other):
    assert len(list(pieces([(whole(100, 600), 512), other]))) == 2


def test_a_piece_has_no_more_parts_than_a_system_call_takes():
    runs = [(whole(4 * n, 4), 512 * n) for n in range(3 * MAX_PARTS)]
    assert [len(each.parts) for each in pieces(runs)] == [MAX_PARTS] * 3


def test_rows_are_read_with_what_lies_between_them():
    run = Run(2, 50, 1000, 40, 3000)
    cut = list(pieces([(run, 512)], 100_000))
    assert cut == [
        Piece(2, 50, 33 * 3000 + 1000, 512, Rows(0, 1000, 34, 3000)),
        Piece(2, 50 + 34 * 3000, 5 * 3000 + 1000, 512 + 34_000, Rows(0, 1000, 6, 3000)),
    ]
    assert not cut[0].whole


def test_rows_far_apart_are_read_one_by_one():
    run = Run(0, 0, 1000, 3, 1000 + APART)
    assert [(each.offset, each.span, each.target) for each in pieces([(run, 0)])] == [
        (0, 1000, 0),
        (1000 + APART, 1000, 1000),
        (2000 + 2 * APART, 1000, 2000),
    ]


def test_rows_without_gaps_are_one_run():
    assert list(pieces([(Run(0, 9, 100, 5, 100), 0)])) == [Piece(0, 9, 500, 0, Rows(0, 500))]
