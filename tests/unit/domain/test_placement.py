from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.ids import device_id
from preloadd.domain.placement import (
    ExpertPlacement,
    Parallel,
    Placement,
    as_reported,
    drafting,
    experts_of,
    instances,
    layers_of,
    place,
)
from preloadd.errors import ConfigError

SIZE = st.integers(1, 5)
PARALLEL = st.builds(
    Parallel,
    tensor=SIZE,
    pipeline=SIZE,
    data=SIZE,
    expert=st.booleans(),
    expert_placement=st.sampled_from(ExpertPlacement),
)


def everyone(parallel: Parallel) -> list[Placement]:
    return [place(parallel, rank) for rank in range(parallel.world)]


@pytest.mark.parametrize(
    ("parallel", "drafting"),
    [
        (Parallel(tensor=4), [0, 1, 2, 3]),
        (Parallel(pipeline=4), [3]),
        (Parallel(tensor=2, pipeline=2), [2, 3]),
        (Parallel(pipeline=2, data=2), [1, 3]),
    ],
)
def test_drafts_are_where_the_last_layers_are(parallel, drafting):
    devices = [device_id(f"CPU-{number}") for number in range(4)]
    targets = [f"CPU-{number}" for number in range(4)]
    drafts = [f"CPU-{number}.draft" for number in drafting]
    assert [*map(str, instances(devices, parallel, drafts=False))] == targets
    assert [*map(str, instances(devices, parallel, drafts=True))] == [*targets, *drafts]


def test_drafts_of_a_later_node_are_where_it_has_the_last_layers():
    devices = [device_id(f"CPU-{number}") for number in range(3)]
    found = instances(devices, Parallel(tensor=2, pipeline=3), drafts=True, first=3)
    assert [*map(str, found)][3:] == ["CPU-1.draft", "CPU-2.draft"]


@given(PARALLEL)
def test_drafts_are_counted_by_data_and_tensor_ranks_of_the_last_stage(parallel):
    """Each of which the product below names once, in this order."""
    wanted = [
        Placement(parallel, tensor, parallel.pipeline - 1, data).rank
        for data, tensor in product(range(parallel.data), range(parallel.tensor))
    ]
    assert list(drafting(parallel)) == wanted
    last = [place(parallel, rank) for rank in drafting(parallel)]
    # A draft's experts are dealt by the same numbers.
    assert [placement.expert_share for placement in last] == [
        (len(last), number) for number in range(len(last))
    ]


@given(PARALLEL, st.data())
def test_nodes_have_the_drafts_of_their_own_ranks_and_all_of_them_together(parallel, data):
    cuts = data.draw(st.sets(st.integers(1, parallel.world)))
    bounds = [0, *sorted(cuts | {parallel.world})]
    found, daemons = [], 0
    for start, stop in pairwise(bounds):
        here = drafting(parallel, range(start, stop))
        devices = [device_id(f"CPU-{number}") for number in range(stop - start)]
        held = instances(devices, parallel, drafts=True, first=start)
        beside = [str(one.device) for one in held[len(devices) :]]
        assert beside == [f"CPU-{rank - start}" for rank in here]
        found += here
        daemons += len(held)
    assert found == [*drafting(parallel)]
    assert daemons == parallel.world + len(found)


@given(PARALLEL, st.data())
def test_replicas_of_a_dense_model_are_alone_and_those_with_experts_are_not(parallel, data):
    placement = place(parallel, data.draw(st.integers(0, parallel.world - 1)))
    assert as_reported(placement, moe=True) == placement
    alone = as_reported(placement, moe=False)
    assert alone.parallel == replace(parallel, data=1)
    assert alone == place(alone.parallel, placement.rank % parallel.replica)


def test_every_wrong_size_is_named():
    with pytest.raises(ConfigError) as caught:
        Parallel(tensor=0, pipeline=2, data=-1)
    assert str(caught.value).splitlines() == [
        "tensor parallel size is 0: at least 1",
        "data parallel size is -1: at least 1",
    ]


def test_every_wrong_coordinate_is_named():
    with pytest.raises(ConfigError) as caught:
        Placement(Parallel(tensor=2, data=3), tensor_rank=2, pipeline_rank=-1, data_rank=2)
    assert str(caught.value).splitlines() == [
        "tensor parallel rank is 2: expected 0 to 1",
        "pipeline parallel rank is -1: expected 0 to 0",
    ]


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_of_the_group_is_refused(rank):
    with pytest.raises(ConfigError, match=f"no rank {rank}: its ranks are 0 to 5"):
        place(Parallel(tensor=2, data=3), rank)


@given(PARALLEL)
def test_a_rank_is_placed_and_counted_back(parallel):
    assert [placement.rank for placement in everyone(parallel)] == [*range(parallel.world)]


@given(PARALLEL)
def test_ranks_count_tensor_fastest_then_pipeline_then_data(parallel):
    wanted = product(range(parallel.data), range(parallel.pipeline), range(parallel.tensor))
    assert [(p.data_rank, p.pipeline_rank, p.tensor_rank) for p in everyone(parallel)] == list(
        wanted
    )


@pytest.mark.parametrize(
    ("parallel", "undivided"),
    [
        (Parallel(), True),
        (Parallel(data=4), False),
        (Parallel(expert=True), True),
        (Parallel(tensor=2), False),
        (Parallel(pipeline=2), False),
        (Parallel(data=2, expert=True), False),
    ],
)
def test_a_rank_is_undivided_when_it_is_the_only_one(parallel, undivided):
    assert place(parallel, 0).undivided is undivided


# ---- experts


@pytest.mark.parametrize(
    ("experts", "size", "how", "dealt"),
    [
        (8, 2, ExpertPlacement.LINEAR, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (7, 3, ExpertPlacement.LINEAR, [[0, 1, 2], [3, 4], [5, 6]]),
        (2, 3, ExpertPlacement.LINEAR, [[0], [1], []]),
        (8, 2, ExpertPlacement.ROUND_ROBIN, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (7, 3, ExpertPlacement.ROUND_ROBIN, [[0, 3, 6], [1, 4], [2, 5]]),
        (2, 3, ExpertPlacement.ROUND_ROBIN, [[0], [1], []]),
    ],
)
def test_experts_are_dealt(experts, size, how, dealt):
    parallel = Parallel(tensor=size, expert=True, expert_placement=how)
    assert [list(experts_of(p, experts)) for p in everyone(parallel)] == dealt


@pytest.mark.parametrize("expert", [True, False])
def test_experts_are_held_by_data_and_tensor_ranks_of_each_stage(expert):
    parallel = Parallel(tensor=2, pipeline=2, data=2, expert=expert)
    shares = [p.expert_share for p in everyone(parallel)]
    assert shares == [(4, rank) for rank in (0, 1, 0, 1, 2, 3, 2, 3)]
    dealt = [(p.expert_size, p.expert_rank) for p in everyone(parallel)]
    assert dealt == (shares if expert else [(1, 0)] * 8)
    assert [p.tensor_share for p in everyone(parallel)] == [(2, 0), (2, 1)] * 4


@given(PARALLEL, st.integers(0, 40))
def test_the_ranks_of_a_stage_share_all_experts(parallel, experts):
    dealt: dict[tuple[int, int], list[int]] = {}
    for placement in everyone(parallel):
        held = list(experts_of(placement, experts))
        assert held == sorted(held)
        if parallel.expert:
            copy = (placement.pipeline_rank, 0)
            assert abs(len(held) - experts / placement.expert_size) < 1
        else:
            copy = (placement.pipeline_rank, placement.data_rank * 5 + placement.tensor_rank)
        dealt.setdefault(copy, []).extend(held)
    assert all(sorted(numbers) == list(range(experts)) for numbers in dealt.values())


# ---- layers


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        (8, [8]),
        (8, [4, 4]),
        (9, [5, 4]),
        (30, [7, 8, 8, 7]),
        (31, [8, 8, 8, 7]),
        (29, [7, 7, 8, 7]),
        (4, [1, 1, 1, 1]),
        (61, [7, 7, 8, 8, 8, 8, 8, 7]),
    ],
)
def test_layers_are_dealt_to_stages(layers, sizes):
    parallel = Parallel(pipeline=len(sizes))
    assert [len(layers_of(p, layers)) for p in everyone(parallel)] == sizes


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="2 layers do not make 3 pipeline stages: use at most 2"):
        layers_of(place(Parallel(pipeline=3), 0), 2)


@given(PARALLEL, st.integers(0, 40))
def test_stages_cover_all_layers_in_order(parallel, more):
    layers = parallel.pipeline + more
    for data_rank, tensor_rank in product(range(parallel.data), range(parallel.tensor)):
        stages = [
            layers_of(Placement(parallel, tensor_rank, stage, data_rank), layers)
            for stage in range(parallel.pipeline)
        ]
        assert [layer for stage in stages for layer in stage] == list(range(layers))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1
        assert len(stages[-1]) == min(map(len, stages))
