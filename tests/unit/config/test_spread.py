import pytest

from preloadd.config.spread import Spread, rendezvous, spread_faults
from preloadd.domain.ids import Role
from preloadd.domain.launch import Launch
from preloadd.domain.nodes import plan_node
from preloadd.domain.placement import Parallel
from preloadd.domain.settings import Rendezvous
from tests.placements import ROWS, launch_of


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
    """Every rank's number is told by its node alone; together they have to be all numbers."""
    launch = launch_of(row.flags, drafts=row.drafts)
    assert not [fault for fault in spread_faults(launch) if fault.setting != "devices"]
    node = plan_node(launch)
    for role in Role:
        own = [one for one in node.instances if one.role is role]
        met = [rendezvous(node, one) for one in own]
        if node.count == 1:
            assert not any(met)
            continue
        port = node.meeting.draft_port if role is Role.DRAFT else node.meeting.port
        for one, found in zip(own, met, strict=True):
            place = node.placement_on(one.device)
            drafting = place.data_rank * node.parallel.tensor + place.tensor_rank
            size = node.parallel.data * node.parallel.tensor
            assert found == Rendezvous(
                address=node.meeting.address,
                port=port,
                rank=place.rank if role is Role.TARGET else drafting,
                world=node.parallel.world if role is Role.TARGET else size,
                node=node.number,
                nodes=node.count,
            )
