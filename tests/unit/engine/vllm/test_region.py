import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.manifest import ALIGNMENT, Kind
from preloadd.engine.vllm.region import Region, spans
from tests.unit.engine.vllm.manifests import Row, manifest

PAGE = 4096
PARAMETER, BUFFER, HIDDEN = Kind.PARAMETER, Kind.BUFFER, Kind.HIDDEN


def copies(weights):
    """Of all that are no parameters, by name."""
    region = Region(weights)
    columns = weights.manifest.tensors
    return {
        name: region.copy_of(name, weights.tensors[name])
        for name, kind in zip(columns.name, columns.kind, strict=True)
        if kind != PARAMETER
    }


def assert_own(weights, made):
    """They are equal to what is shared, and writing to them changes nothing that is."""
    for name, tensor in made.items():
        shared = weights.tensors[name]
        assert (tensor.dtype, tensor.shape) == (shared.dtype, shared.shape)
        assert torch.equal(tensor.view(torch.uint8), shared.view(torch.uint8)), name
        assert not weights.shares(tensor)
        before = shared.clone()
        tensor.zero_()
        assert torch.equal(shared, before)


def test_copies_are_equal_and_independent(weights_of):
    rows = [
        Row("w", PARAMETER, 0, shape=(16,)),
        Row("scale", BUFFER, 1),
        Row("angles", Kind.NON_PERSISTENT_BUFFER, 2, dtype="BF16", shape=(3, 5)),
        Row("::impl.flags", HIDDEN, 3, dtype="I64", shape=()),
        Row("::impl.pairs", HIDDEN, 4, dtype="F4", shape=(2, 6)),
        Row("odd", BUFFER, 5, dtype="U8", shape=(7,)),
    ]
    storages = [(0, 0, 64), (0, 512, 16), (0, 1024, 30), (0, 1536, 8), (0, 2048, 6), (0, 2560, 7)]
    weights = weights_of(manifest(rows, storages, (PAGE,)))
    made = copies(weights)
    assert len(made) == 5
    assert made["angles"].stride() == (5, 1)
    flags, pairs = made.pop("::impl.flags"), made.pop("::impl.pairs")
    assert flags.item() == weights.tensors["::impl.flags"].item()
    assert pairs.shape == (2, 3)
    assert torch.equal(pairs.view(torch.uint8), weights.tensors["::impl.pairs"].view(torch.uint8))
    assert_own(weights, made)


def test_what_lies_together_is_copied_at_once(weights_of):
    rows = [Row("w", PARAMETER, 0), *(Row(f"b{i}", BUFFER, i) for i in range(1, 4))]
    storages = [(0, 512 * i, 16) for i in range(4)]
    weights = weights_of(manifest(rows, storages, (PAGE,)))
    made = copies(weights)
    assert len({tensor.untyped_storage().data_ptr() for tensor in made.values()}) == 1
    # They do not get into each other's way.
    made["b1"].zero_()
    assert torch.equal(made["b2"], weights.tensors["b2"])


def test_several_chunks_with_and_without_parameters(weights_of):
    rows = [
        Row("w", PARAMETER, 0),
        Row("v", PARAMETER, 1),
        Row("one", BUFFER, 2),
        Row("two", BUFFER, 3),
        Row("three", HIDDEN, 4),
    ]
    storages = [(0, 0, 16), (1, 0, 16), (1, 512, 16), (2, 0, 16), (2, 512, 16)]
    described = manifest(rows, storages, (PAGE, PAGE, PAGE))
    assert list(spans(described)) == [(1, 512, 528), (2, 0, 528)]
    assert_own(weights := weights_of(described), copies(weights))


def test_a_buffer_that_is_a_view_of_a_parameter_is_copied_alone(weights_of):
    rows = [
        Row("w", PARAMETER, 0, shape=(8, 4)),
        Row("view", BUFFER, 0, shape=(2, 4), skip=8),
        Row("::impl.column", HIDDEN, 0, shape=(8,), strides=(4,), skip=1),
        Row("scale", BUFFER, 1),
    ]
    weights = weights_of(manifest(rows, [(0, 0, 128), (0, 512, 16)], (PAGE,)))
    made = copies(weights)
    column = made.pop("::impl.column")
    assert torch.equal(column, weights.tensors["w"][:, 1])
    assert not weights.shares(column)
    assert_own(weights, made)


def test_views_of_one_storage_stay_views_of_one(weights_of):
    rows = [
        Row("whole", BUFFER, 0, shape=(4, 6)),
        Row("turned", BUFFER, 0, shape=(6, 4), strides=(1, 6)),
        Row("padded", HIDDEN, 0, shape=(4, 3), strides=(6, 1), skip=2),
        Row("spread", HIDDEN, 0, shape=(5, 2), strides=(0, 1), skip=4),
    ]
    weights = weights_of(manifest(rows, [(0, 0, 96)], (PAGE,)))
    made = copies(weights)
    for name, tensor in made.items():
        assert tensor.stride() == weights.tensors[name].stride()
        assert torch.equal(tensor, weights.tensors[name])
        assert not weights.shares(tensor)
    made["whole"].zero_()
    assert not any(tensor.any() for tensor in made.values())


@pytest.mark.parametrize("kind", [PARAMETER, BUFFER, HIDDEN])
def test_tensors_without_elements(kind, weights_of):
    rows = [
        Row("w", PARAMETER, 0),
        Row("none", kind, 1, shape=(0, 3)),
        Row("scale", BUFFER, 2),
        Row("last", kind, 3, shape=(0,)),
    ]
    storages = [(0, 0, 16), (0, 512, 0), (0, 512, 16), (0, 1024, 0)]
    weights = weights_of(manifest(rows, storages, (PAGE,)))
    made = copies(weights)
    if kind is not PARAMETER:
        assert made["none"].shape == (0, 3)
    assert torch.equal(made["scale"], weights.tensors["scale"])
    assert not weights.shares(made["scale"])


def test_without_buffers_there_is_nothing_to_copy(weights_of):
    described = manifest([Row("w", PARAMETER, 0)], [(0, 0, 16)], (PAGE,))
    assert list(spans(described)) == []
    assert copies(weights_of(described)) == {}


def test_what_lies_before_a_parameter_is_copied_alone(weights_of):
    """No builder of ours leaves it so, but a manifest may say it."""
    rows = [Row("early", BUFFER, 0), Row("w", PARAMETER, 1), Row("late", BUFFER, 2)]
    described = manifest(rows, [(0, 0, 16), (0, 512, 16), (0, 1024, 16)], (PAGE,))
    assert list(spans(described)) == [(0, 1024, 1040)]
    assert_own(weights := weights_of(described), copies(weights))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 1500)), min_size=1))
def test_spans_hold_no_parameter_and_all_that_lies_behind_the_last(described):
    offsets, storages, rows = [0, 0, 0], [], []
    for number, (chunk, is_parameter, nbytes) in enumerate(sorted(described, key=lambda x: x[0])):
        storages.append((chunk, offsets[chunk], nbytes))
        offsets[chunk] = -(-(offsets[chunk] + nbytes) // ALIGNMENT) * ALIGNMENT
        kind = PARAMETER if is_parameter else BUFFER
        rows.append(Row(f"t{number}", kind, number, dtype="U8", shape=(nbytes,)))
    made = manifest(rows, storages, tuple(max(offset, 1) for offset in offsets))
    found = {chunk: range(first, end) for chunk, first, end in spans(made)}
    assert len(found) == len(list(spans(made)))
    for number, (chunk, offset, nbytes) in enumerate(storages):
        if not nbytes:
            continue
        span = found.get(chunk, range(0))
        inside = offset in span and offset + nbytes - 1 in span
        later = any(
            row.kind is PARAMETER and storages[row.storage][0] == chunk for row in rows[number:]
        )
        assert inside is not later
        assert inside or not set(range(offset, offset + nbytes)) & set(span)
