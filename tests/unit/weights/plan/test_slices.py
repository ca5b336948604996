import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain import dtypes
from preloadd.errors import UnsupportedModel
from preloadd.weights.plan.slices import Run, Slice, Source, cut, whole

BYTES = Source(file=3, dtype="U8", shape=(4, 6), start=100, nbytes=24)


def test_the_whole_of_a_tensor_is_one_run():
    assert whole("w", BYTES) == Slice(
        name="w",
        dtype="U8",
        shape=(4, 6),
        whole_shape=(4, 6),
        axis=None,
        spans=(),
        runs=(Run(file=3, offset=100, row_nbytes=24, rows=1, stride=24),),
    )


@pytest.mark.parametrize(
    ("axis", "spans", "shape", "runs"),
    [
        pytest.param(0, [range(1, 3)], (2, 6), [(106, 12, 1, 12)], id="rows"),
        pytest.param(1, [range(2, 4)], (4, 2), [(102, 2, 4, 6)], id="columns"),
        pytest.param(
            0, [range(1), range(2, 3)], (2, 6), [(100, 6, 2, 12)], id="equal-parts-of-rows"
        ),
        pytest.param(
            0, [range(2), range(3, 4)], (3, 6), [(100, 12, 1, 12), (118, 6, 1, 6)], id="unequal"
        ),
        pytest.param(
            1, [range(1), range(3, 4)], (4, 2), [(100, 1, 8, 3)], id="equal-parts-of-columns"
        ),
        pytest.param(
            1,
            [range(1), range(2, 3)],
            (4, 2),
            [(100 + at, 1, 1, 1) for at in (0, 2, 6, 8, 12, 14, 18, 20)],
            id="parts-at-uneven-distance",
        ),
        pytest.param(0, [range(1), range(1, 2)], (2, 6), [(100, 12, 1, 12)], id="adjacent"),
        pytest.param(0, [], (0, 6), [], id="nothing"),
        pytest.param(1, [range(3, 3)], (4, 0), [], id="empty-span"),
        pytest.param(1, [range(3), range(3, 6)], (4, 6), [(100, 24, 1, 24)], id="everything"),
    ],
)
def test_a_cut_becomes_runs(axis, spans, shape, runs):
    piece = cut("w", BYTES, axis, spans)
    assert piece.shape == shape
    assert piece.whole_shape == (4, 6)
    assert [(r.offset, r.row_nbytes, r.rows, r.stride) for r in piece.runs] == runs


def test_stacked_experts_cut_inside_each_fused_part_stay_one_run():
    """Three experts of gate and up, two ranks: six pieces at equal distance."""
    source = Source(0, "BF16", (3, 8, 5), 0, 240)
    piece = cut("w", source, 1, [range(2, 4), range(6, 8)])
    assert piece.runs == (Run(file=0, offset=20, row_nbytes=20, rows=6, stride=40),)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0)])
def test_scalars_and_empty_tensors_are_whole(shape):
    source = Source(0, "F32", shape, 8, 4 * int(np.prod(shape)))
    piece = whole("w", source)
    assert piece.shape == shape
    assert piece.nbytes == source.nbytes
    assert len(piece.runs) == (source.nbytes > 0)


@pytest.mark.parametrize(
    ("dtype", "axis", "span"),
    [("F4", 1, range(1)), ("F4", 1, range(1, 3)), ("F6_E2M3", 0, range(1))],
)
def test_a_packed_dtype_is_not_cut_inside_a_byte(dtype, axis, span):
    source = Source(0, dtype, (4, 6), 0, dtypes.nbytes(dtype, 24))
    with pytest.raises(UnsupportedModel, match=rf"layer\.w: .* {dtype} falls inside a byte.*or 1$"):
        cut("layer.w", source, axis, [span])


@st.composite
def cuts(draw):
    """A shape, an axis of it, and disjoint ascending spans along that axis."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=4)))
    axis = draw(st.integers(0, len(shape) - 1))
    taken = sorted(draw(st.sets(st.integers(0, shape[axis] - 1)))) if shape[axis] else []
    return shape, axis, [range(index, index + 1) for index in taken]


@given(cuts(), st.sampled_from(["U8", "BF16", "F64"]))
def test_a_cut_reads_what_indexing_takes(checkpoint, chosen, dtype):
    shape, axis, spans = chosen
    made = checkpoint({"before": (3,), "other": (1,), "w": shape, "after": (2,)}, dtype)
    piece = cut("w", made.sources["w"], axis, spans)
    expected = np.take(made.bits("w"), [span.start for span in spans], axis)
    assert np.array_equal(made.held(piece), expected)
    assert piece.shape == expected.shape[:-1]


@given(cuts())
def test_packed_elements_are_cut_at_bytes_or_not_at_all(checkpoint, chosen):
    shape, axis, spans = chosen
    shape = (*shape, 2)
    made = checkpoint({"w": shape}, "F4")
    piece = cut("w", made.sources["w"], axis, spans)
    expected = np.take(made.bits("w"), [span.start for span in spans], axis)
    assert np.array_equal(made.held(piece), expected)
