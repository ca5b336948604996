import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.placement import Parallel, Share
from preloadd.errors import CheckpointError
from preloadd.weights.plan.dimensions import Dimensions
from preloadd.weights.plan.division import counts, fitting, spans, uneven
from preloadd.weights.plan.families import Rule, Unit

DIMS = Dimensions(layers=1, heads=8, kv_heads=2, head_dim=4, experts=0, tied=False)
QKV = Rule(0, (Unit.HEADS, Unit.KV_HEADS, Unit.KV_HEADS))
GATE_UP = Rule(0, (Unit.FEED_FORWARD, Unit.FEED_FORWARD))


def taken(rule: Rule, shape: tuple[int, ...], ranks: int) -> list[list[tuple[int, int]]]:
    return [
        [(span.start, span.stop) for span in spans(rule, "w", shape, DIMS, Share(ranks, r))]
        for r in range(ranks)
    ]


@pytest.mark.parametrize(
    ("rule", "shape", "ranks", "expected"),
    [
        (Rule(0, (Unit.HEADS,)), (32, 5), 2, [[(0, 16)], [(16, 32)]]),
        (Rule(1, (Unit.HEADS,)), (5, 32), 2, [[(0, 16)], [(16, 32)]]),
        (Rule(0, (Unit.KV_HEADS,)), (8, 5), 2, [[(0, 4)], [(4, 8)]]),
        (Rule(0, (Unit.KV_HEADS,)), (8, 5), 4, [[(0, 4)], [(0, 4)], [(4, 8)], [(4, 8)]]),
        (QKV, (48, 5), 2, [[(0, 16), (32, 36), (40, 44)], [(16, 32), (36, 40), (44, 48)]]),
        (
            QKV,
            (48, 5),
            4,
            [
                [(0, 8), (32, 36), (40, 44)],
                [(8, 16), (32, 36), (40, 44)],
                [(16, 24), (36, 40), (44, 48)],
                [(24, 32), (36, 40), (44, 48)],
            ],
        ),
        (GATE_UP, (12, 5), 2, [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]),
        (Rule(), (5,), 2, [[], []]),
    ],
)
def test_each_rank_takes_its_share_of_each_part(rule, shape, ranks, expected):
    assert taken(rule, shape, ranks) == expected


def test_what_has_to_divide_is_counted_in_units():
    assert list(counts(QKV, "w", (48, 5), DIMS)) == [
        (Unit.HEADS, 8),
        (Unit.KV_HEADS, 2),
        (Unit.KV_HEADS, 2),
    ]
    assert list(counts(GATE_UP, "w", (12, 5), DIMS)) == [(Unit.FEED_FORWARD, 6)] * 2
    assert list(counts(Rule(), "w", (12, 5), DIMS)) == []


@pytest.mark.parametrize(
    ("rule", "shape", "told"),
    [
        (
            Rule(0, (Unit.HEADS,)),
            (40, 5),
            "w is 40 long on axis 0, but config.json says 8 attention",
        ),
        (QKV, (40, 5), "8 attention heads and 2 key-value heads of 4"),
        (GATE_UP, (13, 5), "w is 13 long on axis 0, but holds 2 equal parts"),
        (Rule(1, (Unit.HEADS,)), (32,), r"w has shape \(32,\): expected at least 2 axes"),
        (Rule(0, (Unit.VOCABULARY,)), (), r"w has shape \(\): expected at least 1 axes"),
    ],
)
def test_a_tensor_that_contradicts_config_is_named(rule, shape, told):
    with pytest.raises(CheckpointError, match=told):
        list(counts(rule, "w", shape, DIMS))


def test_what_does_not_divide_is_told_with_its_numbers():
    found = [(Unit.HEADS, 9), (Unit.KV_HEADS, 3), (Unit.FEED_FORWARD, 64), (Unit.VOCABULARY, 7)]
    assert uneven(found, Parallel(tensor=2)) == [
        "9 attention heads do not divide by 2 tensor-parallel ranks",
        "3 key-value heads do not divide by 2 tensor-parallel ranks",
        "7 vocabulary entries do not divide by 2 tensor-parallel ranks",
    ]


@pytest.mark.parametrize(
    ("heads", "ranks", "fits"),
    [(4, 2, True), (2, 4, True), (1, 8, True), (3, 2, False), (4, 6, False), (6, 4, False)],
)
def test_key_value_heads_divide_either_way(heads, ranks, fits):
    parallel = Parallel(tensor=ranks)
    assert (uneven([(Unit.KV_HEADS, heads)], parallel) == []) is fits
    assert (uneven([(Unit.HEADS, heads)], parallel) == []) is (heads % ranks == 0)


def test_all_replicas_cut_what_is_of_experts_and_nothing_else():
    found = [(unit, 6) for unit in Unit]
    assert uneven(found, Parallel(tensor=2, data=2)) == [
        "6 feed-forward units of an expert do not divide by 4 ranks (2 tensor x 2 data)"
    ]
    assert uneven(found, Parallel(tensor=2, data=3)) == []


def test_sizes_that_fit_are_those_that_divide_everything():
    found = [(Unit.HEADS, 12), (Unit.KV_HEADS, 2), (Unit.FEED_FORWARD, 24)]
    assert fitting(found) == [1, 2, 4, 6, 12]
    experts = [*found, (Unit.EXPERT, 24)]
    assert fitting(experts, data=2) == [1, 2, 4, 6, 12]
    assert fitting(experts, data=4) == [1, 2, 6]
    assert fitting(experts, data=5) == []


@given(st.lists(st.tuples(st.sampled_from(Unit), st.integers(1, 10**12))))
def test_looking_for_sizes_that_fit_ends_soon_and_finds_one(found):
    assert fitting(found)[0] == 1
