from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.experts import has_experts, held_as
from preloadd.domain.placement import ExpertPlacement, Parallel, place

LINEAR, ROUND_ROBIN = ExpertPlacement
TURNS = Parallel(tensor=2, expert=True, expert_placement=ROUND_ROBIN)
MIXED = [{"block_type": "attention"}, {"block_type": "moe", "n_routed_experts": 8}]
GROUPED = {"n_routed_experts": 8, "n_group": 2}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, False),
        ({"num_experts": 8}, True),
        ({"moe_num_experts": 8}, True),
        ({"moe_num_experts": [8, 8]}, True),
        ({"moe_num_experts": [0]}, False),
        ({"n_routed_experts": 8}, True),
        ({"num_local_experts": 8}, True),
        ({"num_experts": None, "num_local_experts": 8}, False),
        ({"num_experts": 0}, False),
        ({"num_experts": None}, False),
        ({"text_config": {"num_experts": 8}}, True),
        ({"text_config": {}, "num_experts": 8}, False),
        ({"moe_num_experts": [0, 8]}, False),
        ({"moe_num_experts": [], "block_configs": MIXED}, False),
        ({"num_experts": 0, "block_configs": MIXED}, True),
        ({"block_configs": MIXED}, True),
        # As vLLM counts them: none.
        ({"block_configs": [{"block_type": "moe"}]}, False),
        ({"block_configs": [{"block_type": "mlp"}, "moe"]}, False),
        ({"block_configs": "moe"}, False),
    ],
)
def test_config_counts_experts_by_several_names(config, found):
    assert has_experts(config) is found


@pytest.mark.parametrize(
    ("parallel", "config", "how"),
    [
        (TURNS, GROUPED, ROUND_ROBIN),
        (TURNS, {"text_config": GROUPED}, ROUND_ROBIN),
        (TURNS, GROUPED | {"n_group": 1}, LINEAR),
        (TURNS, GROUPED | {"n_group": None}, LINEAR),
        (TURNS, GROUPED | {"n_group": "2"}, LINEAR),
        (TURNS, {"num_experts": 8}, LINEAR),
        (TURNS, {}, LINEAR),
        (replace(TURNS, data=2), GROUPED, LINEAR),
        (replace(TURNS, expert=False), GROUPED, LINEAR),
        (replace(TURNS, expert_placement=LINEAR), GROUPED, LINEAR),
        (replace(TURNS, pipeline=2), GROUPED, ROUND_ROBIN),
    ],
)
def test_experts_are_dealt_in_turns_where_vllm_would(parallel, config, how):
    for rank in range(parallel.world):
        assert held_as(place(parallel, rank), config).parallel.expert_placement is how


SIZE = st.integers(1, 4)


@given(SIZE, SIZE, SIZE, st.booleans(), st.sampled_from(ExpertPlacement), st.data())
def test_replicas_are_alone_unless_they_have_experts(tensor, pipeline, data, expert, how, drawn):
    parallel = Parallel(tensor, pipeline, data, expert, how)
    at = place(parallel, drawn.draw(st.integers(0, parallel.world - 1)))
    shared, alone = held_as(at, {"num_experts": 8}), held_as(at, {})
    assert (shared.rank, shared.parallel.world) == (at.rank, parallel.world)
    assert alone.parallel.world == parallel.replica
    assert alone.rank == at.rank % parallel.replica
