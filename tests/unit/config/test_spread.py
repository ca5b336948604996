from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from preloadd.config.spread import Spread, rendezvous, spread_faults
from preloadd.domain.ids import Role
from preloadd.domain.launch import Launch
from preloadd.domain.nodes import plan_node
from preloadd.domain.placement import Parallel, drafting
from preloadd.domain.settings import Rendezvous
from tests.placements import GROUPS, ROWS, launch_of


def test_every_field_of_a_launch_can_be_said():
    said = {
        "nnodes": 2,
        "node_rank": 1,
        "data_parallel_size_local": 3,
        "data_parallel_start_rank": 4,
        "data_parallel_address": "a",
        "master_addr": "b",
        "weight_cache_master_port": 5,
        "weight_cache_draft_master_port": 6,
        "master_port": 7,
        "data_parallel_rpc_port": 8,
    }
    sizes = {"tensor_parallel_size": 9, "pipeline_parallel_size": 10, "data_parallel_size": 11}
    spread = Spread(**said, **sizes, enable_expert_parallel=True)
    assert {*said, *sizes} | {"enable_expert_parallel", "expert_placement_strategy"} == {
        *Spread.model_fields
    }
    found = spread.launch(["CPU-0"], drafts=True, others={"x": 1})
    parallel = Parallel(tensor=9, pipeline=10, data=11, expert=True)
    assert found == Launch(
        parallel=parallel, devices=("CPU-0",), drafts=True, others={"x": 1}, **said
    )
    assert Spread().launch() == Launch(parallel=Parallel())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_ranks_of_a_role_have_each_a_place_of_their_own(row):
    """Every rank's number is told by its node alone."""
    launch = launch_of(row.flags, drafts=row.drafts)
    assert not [fault for fault in spread_faults(launch) if fault.setting != "devices"]
    node = plan_node(launch)
    for role in Role:
        own = [one for one in node.instances if one.role is role]
        met = [rendezvous(node, one) for one in own]
        everybody = drafting(node.parallel) if role is Role.DRAFT else range(node.parallel.world)
        if set(everybody) <= set(node.ranks):
            assert not any(met)
            continue
        port = node.meeting.draft_port if role is Role.DRAFT else node.meeting.port
        for one, found in zip(own, met, strict=True):
            place = node.placement_on(one.device)
            number = place.data_rank * node.parallel.tensor + place.tensor_rank
            size = node.parallel.data * node.parallel.tensor
            assert found == Rendezvous(
                address=node.meeting.address,
                port=port,
                rank=place.rank if role is Role.TARGET else number,
                world=node.parallel.world if role is Role.TARGET else size,
                node=node.number if node.counted else 0,
                nodes=node.count if node.counted else 0,
                role=role,
            )


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_no_two_nodes_of_a_group_number_ranks_alike(group, role):
    nodes = [plan_node(launch_of(row.flags, drafts=group.drafts)) for row in group.rows()]
    places = [
        place
        for node in nodes
        for one in node.instances
        if one.role is role and (place := rendezvous(node, one)) is not None
    ]
    numbers = [place.rank for place in places]
    assert len(set(numbers)) == len(numbers)
    assert all(number < place.world for number, place in zip(numbers, places, strict=True))
    if sum(len(node.ranks) for node in nodes) == nodes[0].parallel.world and places:
        assert sorted(numbers) == [*range(places[0].world)]


SIZE = st.integers(1, 4)


@given(st.builds(Parallel, tensor=SIZE, pipeline=SIZE, data=SIZE), st.integers(1, 16))
def test_drafts_of_all_nodes_meet_under_numbers_of_their_own(parallel, nodes):
    common = Launch(
        parallel=parallel,
        drafts=True,
        devices=tuple(f"CPU-{number}" for number in range(parallel.world)),
        nnodes=nodes,
        node_rank=0,
        master_addr="10.0.0.1",
        weight_cache_master_port=29600,
    )
    assume(not spread_faults(common))
    having: set[int] = set()
    met, drafts = [], 0
    for number in range(nodes):
        node = plan_node(replace(common, node_rank=number))
        own = [one for one in node.instances if one.role is Role.DRAFT]
        having |= {number} if own else set()
        drafts += len(own)
        met += [found for one in own if (found := rendezvous(node, one)) is not None]
    assert drafts == parallel.data * parallel.tensor
    assert [(each.rank, each.world) for each in met] == (
        [(number, drafts) for number in range(drafts)] if len(having) > 1 else []
    )
    # They meet at an address of the first node, where one of them has to listen.
    assert not met or 0 in having


def test_nodes_that_are_told_by_replicas_claim_no_number_of_nodes():
    """One with two of three replicas would take itself for one of two, the other for one of
    three."""
    told = Launch(
        parallel=Parallel(data=3),
        data_parallel_size_local=2,
        data_parallel_start_rank=0,
        devices=("CPU-0", "CPU-1"),
        data_parallel_address="10.0.0.1",
        weight_cache_master_port=29600,
    )
    other = replace(told, data_parallel_size_local=1, data_parallel_start_rank=2)
    met = [
        rendezvous(node, one)
        for node in map(plan_node, (told, other))
        for one in node.instances[: len(node.ranks)]
    ]
    assert [(place.rank, place.node, place.nodes) for place in met if place] == [
        *((0, 0, 0), (1, 0, 0), (2, 0, 0))
    ]


def test_a_draft_whose_ranks_are_all_on_one_node_meets_nobody():
    """Its target meets those of the first node all the same."""
    told = Launch(
        parallel=Parallel(tensor=2, pipeline=2),
        nnodes=2,
        node_rank=1,
        devices=("CPU-0", "CPU-1"),
        drafts=True,
        master_addr="10.0.0.1",
        weight_cache_master_port=29600,
    )
    assert not spread_faults(told)
    node = plan_node(told)
    met = {str(one): rendezvous(node, one) is not None for one in node.instances}
    assert met == {"CPU-0": True, "CPU-1": True, "CPU-0.draft": False, "CPU-1.draft": False}
