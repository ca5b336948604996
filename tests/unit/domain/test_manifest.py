import dataclasses
import itertools
import math

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from preloadd.domain import dtypes, manifest
from preloadd.domain.manifest import Artifact, Kind, Manifest, Storages, Tensors, check
from preloadd.domain.recipe import Recipe
from preloadd.errors import DamagedManifest

F32, F4 = dtypes.CODES["F32"], dtypes.CODES["F4"]


def make(
    *, storages: dict | None = None, tensors: dict | None = None, **changes: object
) -> Manifest:
    """Two chunks; a matrix, its transposed first half, a buffer, a scalar; one alias."""
    good = Manifest(
        generation="a" * 32,
        layout=1,
        backend="host",
        chunks=(2048, 4096),
        storages=Storages(chunk=[0, 0, 1], offset=[0, 512, 1024], nbytes=[96, 64, 4]),
        tensors=Tensors(
            name=["w", "w.half", "b", "s"],
            kind=[Kind.PARAMETER, Kind.PARAMETER, Kind.BUFFER, Kind.NON_PERSISTENT_BUFFER],
            dtype=[F32, F32, F32, F32],
            shape=[(4, 6), (6, 2), (16,), ()],
            strides=[None, (1, 6), None, None],
            storage=[0, 0, 1, 2],
            skip=[0, 0, 0, 0],
        ),
        key={"checkpoint": "sampled:00"},
        recipe=Recipe({}, ()),
        aliases={"tied": "w"},
    )
    return dataclasses.replace(
        good,
        storages=dataclasses.replace(good.storages, **storages or {}),
        tensors=dataclasses.replace(good.tensors, **tensors or {}),
        **changes,
    )


def test_a_good_manifest_passes_and_says_what_lies_where():
    good = make()
    check(good)
    assert len(good) == 4
    assert good.nbytes == 96 + 64 + 4
    assert good.locate("b") == (0, 512, 64)
    assert good.locate("tied") == good.locate("w") == (0, 0, 96)


def test_a_manifest_without_tensors_passes():
    columns = {field.name: [] for field in dataclasses.fields(Tensors)}
    check(make(tensors=columns, aliases={}))


BAD = {
    "no chunk": (make(chunks=()), "0 chunks"),
    "too many chunks": (make(chunks=(4096,) * (manifest.MAX_CHUNKS + 1)), "129 chunks"),
    "empty chunk": (make(chunks=(2048, 0)), "2 chunks"),
    "chunk of no machine's size": (make(chunks=(2048, 1 << 64)), "18,446,744,073,709,553,664 byte"),
    "more together than there is": (make(chunks=(1 << 47, (1 << 47) + 512)), "no device has as"),
    "short storage column": (make(storages={"offset": [0, 512]}), "storage columns"),
    "unknown chunk": (make(storages={"chunk": [0, 0, 2]}), "storage 2 lies in chunk 2 of 2"),
    "negative chunk": (make(storages={"chunk": [-1, 0, 1]}), "chunk -1"),
    "overlap": (make(storages={"nbytes": [600, 64, 4]}), "storage 1 overlaps"),
    "out of order": (make(storages={"offset": [512, 0, 1024]}), "storage 1 .*out of order"),
    "chunks out of order": (make(storages={"chunk": [1, 0, 1]}), "out of order"),
    "misaligned": (make(storages={"offset": [0, 516, 1024]}), "storage 1 at 516"),
    "negative offset": (make(storages={"offset": [-512, 512, 1024]}), "storage 0"),
    "negative size": (make(storages={"nbytes": [96, 64, -4]}), r"storage 2 at 1024\+-4"),
    "past its chunk": (make(storages={"nbytes": [96, 2048, 4]}), "does not fit chunk 0"),
    "unknown kind": (make(tensors={"kind": [0, 0, 1, len(Kind)]}), "kind"),
    "negative kind": (make(tensors={"kind": [0, -1, 1, 2]}), "kind"),
    "unknown dtype": (make(tensors={"dtype": [F32, F32, F32, len(dtypes.NAMES)]}), "dtype"),
    "negative dtype": (make(tensors={"dtype": [F32, F32, F32, -1]}), "dtype"),
    "unknown storage": (make(tensors={"storage": [0, 0, 1, 3]}), "storage that is not there"),
    "negative storage": (make(tensors={"storage": [0, 0, 1, -1]}), "storage that is not there"),
    "negative skip": (make(tensors={"skip": [0, 0, 0, -1]}), "negative offset"),
    "negative shape": (make(tensors={"shape": [(4, 6), (-6, 2), (16,), ()]}), "w.half has shape"),
    "past its storage": (make(tensors={"shape": [(4, 6), (6, 2), (17,), ()]}), "b reaches past"),
    "skipped past it": (make(tensors={"skip": [0, 0, 1, 0]}), "b reaches past"),
    "strided past it": (make(tensors={"strides": [None, (3, 9), None, None]}), "w.half reaches"),
    "few strides": (make(tensors={"strides": [None, (1,), None, None]}), "w.half has strides"),
    "negative stride": (make(tensors={"strides": [None, (-1, 6), None, None]}), "w.half has"),
    "strides of nothing": (
        make(
            tensors={
                "shape": [(4, 6), (6, 2), (0,), ()],
                "strides": [None, (1, 6), (1, 1), None],
            }
        ),
        "b has strides",
    ),
    "nothing of a size that cannot be": (
        make(tensors={"shape": [(4, 6), (6, 2), (0, 1 << 40, 1 << 40), ()]}),
        "b has shape",
    ),
    "more elements in one place than can be counted": (
        make(
            tensors={
                "shape": [(4, 6), (6, 2), (1 << 32, 1 << 32), ()],
                "strides": [None, (1, 6), (0, 0), None],
            }
        ),
        "b has shape",
    ),
    "a stride that cannot be": (
        make(
            tensors={
                "strides": [None, (1, 6), (1 << 63,), None],
                "shape": [(4, 6), (6, 2), (1,), ()],
            }
        ),
        "b has strides",
    ),
    "inside a byte": (
        make(
            tensors={
                "dtype": [F32, F32, F4, F32],
                "skip": [0, 0, 1, 0],
            }
        ),
        "b starts inside a byte",
    ),
    "listed twice": (make(tensors={"name": ["w", "w", "b", "s"]}), "listed twice"),
    "alias of nothing": (make(aliases={"tied": "gone"}), "alias 'tied' of 'gone'"),
    "alias of an alias": (make(aliases={"tied": "w", "again": "tied"}), "alias 'again'"),
    "alias over a tensor": (make(aliases={"b": "w"}), "alias 'b'"),
    "large artifacts": (
        make(artifacts=(Artifact("table", "t", bytes(manifest.MAX_ARTIFACT_BYTES + 1)),)),
        "artifacts over",
    ),
}


@pytest.mark.parametrize(("damaged", "text"), BAD.values(), ids=BAD)
def test_a_bad_column_is_refused_by_name(damaged, text):
    with pytest.raises(DamagedManifest, match=f"a{{32}}: .*{text}"):
        check(damaged)


@pytest.mark.parametrize("column", [field.name for field in dataclasses.fields(Tensors)])
@pytest.mark.parametrize("length", [3, 5])
def test_tensor_columns_are_of_one_length(column, length):
    values = (getattr(make().tensors, column) * 2)[:length]
    with pytest.raises(DamagedManifest, match="different lengths"):
        check(make(tensors={column: values}))


def test_more_tensors_than_anyone_needs_are_refused():
    with pytest.raises(DamagedManifest, match="too many tensors"):
        check(make(tensors={"name": ["t"] * (manifest.MAX_TENSORS + 1)}))


small = st.integers(-1, 3)
dimensions = st.lists(small, max_size=3).map(tuple)


@st.composite
def anything(draw):
    """Columns that are often good and never far from it."""
    rows = draw(st.integers(0, 3))

    def column(values):
        return draw(st.lists(values, min_size=rows, max_size=rows))

    return make(
        chunks=tuple(draw(st.lists(st.sampled_from([512, 1024, 1040]), min_size=2, max_size=2))),
        storages={
            "chunk": draw(st.just([0, 0]) | st.just([0, 1])),
            "offset": draw(st.sampled_from([[0, 512], [512, 0], [0, 0], [0, 513]])),
            "nbytes": draw(st.lists(st.sampled_from([0, 4, 9, 24, 520]), min_size=2, max_size=2)),
        },
        tensors={
            "name": [f"t{row}" for row in range(rows)],
            "kind": [0] * rows,
            "dtype": column(st.sampled_from([F32, F4, dtypes.CODES["BOOL"]])),
            "shape": column(dimensions),
            "strides": column(st.none() | dimensions),
            "storage": column(st.integers(0, 1)),
            "skip": column(st.sampled_from([0, 0, 0, 1, 2, -1])),
        },
        aliases={},
    )


@given(anything())
def test_every_byte_of_what_passes_lies_where_it_may(candidate):
    try:
        check(candidate)
    except DamagedManifest:
        event("refused")
        return
    event("passed")
    storages, tensors = candidate.storages, candidate.tensors
    taken = set()
    for chunk, offset, nbytes in zip(storages.chunk, storages.offset, storages.nbytes, strict=True):
        own = {(chunk, byte) for byte in range(offset, offset + nbytes)}
        assert not own & taken
        assert all(0 <= byte < candidate.chunks[chunk] for _, byte in own)
        taken |= own
    for row in range(len(candidate)):
        bits = dtypes.BITS[dtypes.NAMES[tensors.dtype[row]]]
        for element in elements(tensors.shape[row], tensors.strides[row]):
            first = (tensors.skip[row] + element) * bits
            assert first >= 0
            assert first + bits <= storages.nbytes[tensors.storage[row]] * 8


def elements(shape, strides):
    """The distance of every element from the first, one by one."""
    if strides is None:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for index in itertools.product(*map(range, shape)):
        yield sum(i * step for i, step in zip(index, strides, strict=True))
