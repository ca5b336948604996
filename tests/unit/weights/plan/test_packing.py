from collections.abc import Iterator
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.manifest import ALIGNMENT, MAX_CHUNKS, Kind, Manifest, Storages, check
from preloadd.domain.recipe import LAYOUT, Recipe
from preloadd.errors import ConfigError
from preloadd.weights.plan.packing import ArenaPlan, lay_out, pack
from preloadd.weights.plan.slices import Slice, Source, whole

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4 * KIB
CUDA = 2 * MIB


def bytes_of(*sizes: int) -> list[Slice]:
    """One tensor of bytes for each size, end to end in one file."""
    starts = accumulate(sizes, initial=0)
    return [
        whole(f"t{index}", Source(0, "U8", (size,), start, size))
        for index, (size, start) in enumerate(zip(sizes, starts, strict=False))
    ]


def prove(plan: ArenaPlan, granularity: int) -> None:
    """What holds for every plan, by the check that guards manifests and by the words of `pack`."""
    check(
        Manifest(
            generation="0" * 32,
            layout=LAYOUT,
            backend="host",
            chunks=plan.chunks,
            storages=plan.storages,
            tensors=plan.tensors,
            key={},
            recipe=Recipe({}, ()),
        )
    )
    assert plan.tensors.name == [each.name for each in plan.slices]
    assert plan.storages.nbytes == [each.nbytes for each in plan.slices]
    assert all(size % granularity == 0 for size in plan.chunks)
    assert plan.arena_nbytes == sum(plan.chunks)
    ends = [0] * len(plan.chunks)
    for chunk, offset, nbytes in rows(plan):
        ends[chunk] = max(ends[chunk], offset + nbytes)
    for size, end in zip(plan.chunks, ends, strict=True):
        assert end <= size < end + granularity or (end, size) == (0, granularity)


def rows(plan: ArenaPlan) -> Iterator[tuple[int, int, int]]:
    storages = plan.storages
    return zip(storages.chunk, storages.offset, storages.nbytes, strict=True)


def test_columns_describe_the_slices():
    source = Source(1, "BF16", (3, 5), 64, 30)
    plan = pack([whole("a", source), *bytes_of(7)], MIB, PAGE)
    assert plan.chunks == (PAGE,)
    assert list(rows(plan)) == [(0, 0, 30), (0, 512, 7)]
    tensors = plan.tensors
    assert tensors.name == ["a", "t0"]
    assert tensors.kind == [Kind.PARAMETER, Kind.PARAMETER]
    assert tensors.dtype == [14, 4]
    assert tensors.shape == [(3, 5), (7,)]
    assert tensors.strides == [None, None]
    assert tensors.storage == [0, 1]
    assert tensors.skip == [0, 0]
    assert plan.tensor_nbytes == 37


@pytest.mark.parametrize(
    ("sizes", "chunks", "where"),
    [
        pytest.param((), (1,), [], id="nothing-still-has-a-chunk"),
        pytest.param((0, 0), (1,), [(0, 0), (0, 0)], id="empty-tensors"),
        pytest.param((8 * KIB, 8 * KIB), (4,), [(0, 0), (0, 8192)], id="exactly-full"),
        pytest.param((8 * KIB, 8 * KIB + 1), (2, 3), [(0, 0), (1, 0)], id="one-byte-too-many"),
        pytest.param((1, 40 * KIB, 1), (1, 10, 1), [(0, 0), (1, 0), (2, 0)], id="oversized-alone"),
        pytest.param((16 * KIB, 0), (4,), [(0, 0), (0, 16384)], id="empty-opens-no-chunk"),
        pytest.param((1, 0, 1), (1,), [(0, 0), (0, 512), (0, 512)], id="empty-between"),
    ],
)
def test_chunks_of_16_kib_in_pages(sizes, chunks, where):
    plan = pack(bytes_of(*sizes), 16 * KIB, PAGE)
    prove(plan, PAGE)
    assert plan.chunks == tuple(PAGE * pages for pages in chunks)
    assert [(chunk, offset) for chunk, offset, _ in rows(plan)] == where


def test_a_chunk_size_below_the_granularity_is_rounded_up():
    plan = pack(bytes_of(CUDA // 2, CUDA // 2, 1), 1, CUDA)
    assert plan.chunks == (CUDA, CUDA)


def test_chunks_grow_rather_than_exceed_the_most_there_may_be():
    plan = pack(bytes_of(*[PAGE] * 1000), PAGE, PAGE)
    prove(plan, PAGE)
    assert 64 <= len(plan.chunks) <= MAX_CHUNKS
    assert plan.arena_nbytes == 1000 * PAGE


def test_the_most_chunks_there_may_be_are_not_too_many():
    assert len(pack(bytes_of(*[PAGE] * MAX_CHUNKS), PAGE, PAGE).chunks) == MAX_CHUNKS


@pytest.mark.parametrize(
    ("chunk_bytes", "granularity", "told"),
    [
        (0, PAGE, "chunk size is 0 bytes"),
        (MIB, 0, "granularity is 0 bytes"),
        (MIB, 1000, "granularity is 1000 bytes: expected multiples of 512"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(chunk_bytes, granularity, told):
    with pytest.raises(ConfigError, match=told):
        pack([], chunk_bytes, granularity)


@given(
    st.lists(st.integers(0, 64 * KIB), max_size=300),
    st.integers(1, 128 * KIB),
    st.sampled_from([ALIGNMENT, PAGE, 64 * KIB]),
)
def test_any_sizes_are_laid_out_in_order(sizes, chunk_bytes, granularity):
    plan = pack(bytes_of(*sizes), chunk_bytes, granularity)
    prove(plan, granularity)
    assert plan.storages.chunk == sorted(plan.storages.chunk)
    assert set(plan.storages.chunk) == set(range(len(plan.chunks))) or not sizes


@given(st.lists(st.integers(1, 64 * KIB), min_size=1, max_size=MAX_CHUNKS), st.integers(1, 2**18))
def test_no_chunk_ends_before_it_must(sizes, chunk_bytes):
    """A chunk exceeds the limit for one large tensor only, and its successor had no room in it."""
    plan = pack(bytes_of(*sizes), chunk_bytes, ALIGNMENT)
    limit = -(-chunk_bytes // ALIGNMENT) * ALIGNMENT
    for index, size in enumerate(plan.chunks):
        held = [nbytes for chunk, _, nbytes in rows(plan) if chunk == index]
        assert size <= limit or len(held) == 1
        following = next((nbytes for chunk, _, nbytes in rows(plan) if chunk == index + 1), None)
        assert following is None or size + following > limit


# ---- what large arenas waste


def dense(hidden: int, units: int, kv: int, vocabulary: int, layers: int) -> list[int]:
    """Elements of a dense model's tensors in the order of a file."""
    layer = [
        hidden,
        hidden * units,
        hidden * units,
        hidden * units,
        hidden,
        kv * hidden,
        hidden * hidden,
        hidden * hidden,
        kv * hidden,
    ]
    return [vocabulary * hidden, *layer * layers, hidden, vocabulary * hidden]


def experts(hidden: int, units: int, count: int, vocabulary: int, layers: int) -> list[int]:
    """Elements of a model of experts, each three tensors of its own."""
    layer = [hidden, count * hidden, *[hidden * units] * 3 * count, hidden, hidden * hidden]
    return [vocabulary * hidden, *layer * layers, hidden, vocabulary * hidden]


REAL = {
    "llama-3.2-1b": dense(2048, 8192, 512, 128256, 16)[:-1],
    "llama-3.1-8b": dense(4096, 14336, 1024, 128256, 32),
    "llama-3.1-70b": dense(8192, 28672, 1024, 128256, 80),
    "llama-3.1-405b": dense(16384, 53248, 1024, 128256, 126),
    "gemma-2-9b": dense(3584, 14336, 2048, 256000, 42)[:-1],
    "mixtral-8x22b": experts(6144, 16384, 8, 32000, 56),
    "qwen3-30b-a3b": experts(2048, 768, 128, 151936, 48),
}


@pytest.mark.parametrize("model", REAL)
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("granularity", [PAGE, CUDA])
@pytest.mark.parametrize("chunk_bytes", [64 * MIB, GIB, 4 * GIB])
def test_real_models_waste_under_one_percent(model, ranks, granularity, chunk_bytes):
    """Two bytes an element; a rank's share of each tensor."""
    sizes = [2 * (count // ranks) for count in REAL[model]]
    plan = pack(bytes_of(*sizes), chunk_bytes, granularity)
    assert plan.tensor_nbytes == sum(sizes)
    assert len(plan.chunks) <= MAX_CHUNKS
    if sum(sizes) >= GIB:
        assert plan.arena_nbytes <= 1.01 * sum(sizes)


def test_a_large_model_gets_few_large_chunks():
    sizes = [2 * count for count in REAL["llama-3.1-70b"]]
    plan = pack(bytes_of(*sizes), GIB, CUDA)
    prove(plan, CUDA)
    assert 32 <= len(plan.chunks) <= MAX_CHUNKS
    assert max(plan.chunks) <= 4 * GIB


@given(
    hidden=st.integers(16, 128).map(lambda n: n * 64),
    ratio=st.sampled_from([1, 2, 3, 3.5, 4, 8]),
    kv_share=st.sampled_from([1, 2, 4, 8]),
    vocabulary=st.integers(32_000, 262_144),
    element=st.sampled_from([1, 2, 4]),
    granularity=st.sampled_from([PAGE, CUDA, 2 * CUDA]),
    chunk_bytes=st.integers(MIB, 8 * GIB),
    small=st.integers(0, 64),
)
def test_from_one_gib_up_an_arena_is_at_most_one_percent_larger_than_its_tensors(
    hidden, ratio, kv_share, vocabulary, element, granularity, chunk_bytes, small
):
    shapes = dense(hidden, int(hidden * ratio), hidden // kv_share, vocabulary, 1)
    once = sum(shapes) * element
    layers = 1 + GIB // max(1, once - 2 * vocabulary * hidden * element)
    shapes = dense(hidden, int(hidden * ratio), hidden // kv_share, vocabulary, min(layers, 200))
    sizes = [count * element for count in shapes] + [small] * 40
    plan = pack(bytes_of(*sizes), chunk_bytes, granularity)
    assert sum(sizes) < GIB or plan.arena_nbytes <= 1.01 * plan.tensor_nbytes
    assert len(plan.chunks) <= MAX_CHUNKS


# ---- sizes alone


@given(
    st.lists(st.integers(0, 64 * KIB), max_size=100),
    st.integers(1, 128 * KIB),
    st.sampled_from([ALIGNMENT, PAGE]),
)
def test_sizes_are_laid_out_as_slices_of_these_sizes_are(sizes, chunk_bytes, granularity):
    chunks, storages = lay_out(sizes, chunk_bytes, granularity)
    plan = pack(bytes_of(*sizes), chunk_bytes, granularity)
    assert (chunks, storages) == (plan.chunks, plan.storages)
    assert storages.nbytes == sizes
    assert storages.nbytes is not sizes


def test_sizes_are_laid_out_one_after_the_other():
    chunks, storages = lay_out([100, 0, 513, 4000], PAGE, PAGE)
    assert chunks == (PAGE, PAGE)
    assert storages == Storages(
        chunk=[0, 0, 0, 1], offset=[0, 512, 512, 0], nbytes=[100, 0, 513, 4000]
    )
    assert lay_out((), PAGE, PAGE) == ((PAGE,), Storages([], [], []))


@pytest.mark.parametrize(
    ("chunk_bytes", "granularity", "told"),
    [(0, PAGE, "chunk size is 0 bytes"), (MIB, 1000, "granularity is 1000 bytes")],
)
def test_sizes_of_chunks_that_make_no_sense_are_refused(chunk_bytes, granularity, told):
    with pytest.raises(ConfigError, match=told):
        lay_out([1], chunk_bytes, granularity)
