from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.ids import DeviceId
from preloadd.domain.launch import Launch
from preloadd.domain.nodes import Node, launch_faults, plan_node
from preloadd.domain.placement import Parallel, Placement, place
from preloadd.errors import ConfigError
from tests.placements import GROUPS, ROWS, launch_of
from tests.refused_placements import REFUSALS

TWO_NODES = Launch(
    parallel=Parallel(tensor=2, pipeline=2, data=2),
    nnodes=2,
    node_rank=1,
    master_addr="node-1",
    weight_cache_master_port=29600,
)


SOME_OF_THE_NODES = {
    "the same, dealt one by one",
    "DP 16 x EP on 4 x 4 with a draft",
    "TP 8 x DP 2 on 4 x 4 with a draft",
}
"""Groups of which the table has not every node."""


def devices(*numbers: int) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(f"CPU-{number}") for number in numbers)


def coordinates(placement: Placement) -> str:
    return f"{placement.data_rank}.{placement.pipeline_rank}.{placement.tensor_rank}"


def met(node: Node) -> str:
    ports = [port for port in (node.meeting.port, node.meeting.draft_port) if port is not None]
    return node.meeting.address + (f":{'/'.join(map(str, ports))}" if ports else "")


# ---- the table


def test_there_are_enough_rows_and_no_two_are_the_same():
    assert len({(row.flags, row.moe, row.drafts) for row in ROWS}) == len(ROWS) >= 60


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_node_launches(row):
    node = plan_node(launch_of(row.flags, drafts=row.drafts))
    told = [coordinates(placement) for placement in node.placements]
    assert (node.ranks, told[0], told[-1]) == (row.ranks, row.first, row.last)
    assert (f"{node.number}/{node.count}", met(node)) == (row.node, row.meeting)
    assert node.devices == devices(*range(len(row.ranks)))
    assert node.drafting == (tuple(row.drafting) if row.drafts else ())
    assert [node.placement_on(device) for device in node.devices] == [*node.placements]


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_cannot_be_is_refused_with_every_reason(refusal):
    with pytest.raises(ConfigError) as caught:
        plan_node(launch_of(refusal.flags.split(), drafts=refusal.drafts))
    assert str(caught.value) == refusal.text


@pytest.mark.parametrize(
    "group",
    [g for g in GROUPS if g.name not in SOME_OF_THE_NODES],
    ids=lambda g: g.name,
)
def test_the_nodes_of_a_group_launch_each_of_its_ranks_once(group):
    nodes = [plan_node(launch_of(row.flags, drafts=group.drafts)) for row in group.rows()]
    ranks = [rank for node in nodes for rank in node.ranks]
    assert ranks == [*range(nodes[0].parallel.world)]
    assert len({node.meeting for node in nodes}) == 1


# ---- devices


def test_devices_that_are_not_known_yet_are_not_judged():
    node = plan_node(TWO_NODES)
    assert (node.ranks, node.devices, node.instances) == (range(4, 8), (), ())


def test_ranks_take_the_first_devices_of_a_node_in_order():
    node = plan_node(replace(TWO_NODES, devices=devices(9, 7, 5, 3, 1)))
    assert node.devices == devices(9, 7, 5, 3)
    assert node.placement_on(DeviceId("CPU-5")) == place(TWO_NODES.parallel, 6)


def test_drafts_are_where_this_node_has_the_last_layers():
    node = plan_node(replace(TWO_NODES, devices=devices(0, 1, 2, 3), drafts=True))
    assert [*map(str, node.instances)] == [
        *("CPU-0", "CPU-1", "CPU-2", "CPU-3"),
        *("CPU-2.draft", "CPU-3.draft"),
    ]


def test_a_node_with_the_first_layers_alone_has_no_drafts():
    told = replace(TWO_NODES, parallel=Parallel(tensor=2, pipeline=2), drafts=True)
    drafts = [
        [str(i) for i in plan_node(replace(told, node_rank=n, devices=devices(0, 1))).instances][2:]
        for n in (0, 1)
    ]
    assert drafts == [[], ["CPU-0.draft", "CPU-1.draft"]]


def test_too_few_devices_and_one_that_is_there_twice_are_refused_together():
    told = launch_faults(replace(TWO_NODES, devices=devices(0, 1, 0)))
    assert [fault.setting for fault in told] == ["devices", "devices"]
    assert told[0].text == "CPU-0 is there twice, but a device holds one rank: name it once"
    assert told[1].text == (
        "2 are too few for the 4 ranks of this node, 4 to 7 of data 2 x pipeline 2 x tensor 2 = 8 "
        "ranks: name 2 more, or change the sizes"
    )
    with pytest.raises(ConfigError, match="--gpus: CPU-0 is there twice"):
        plan_node(replace(TWO_NODES, devices=devices(0, 1, 0)))


def test_devices_are_not_counted_against_ranks_that_are_wrong():
    told = launch_faults(replace(TWO_NODES, nnodes=3, devices=devices(0, 0)))
    assert [fault.setting for fault in told] == ["nnodes", "devices"]


# ---- properties


SIZE = st.integers(1, 4)
PARALLEL = st.builds(Parallel, tensor=SIZE, pipeline=SIZE, data=SIZE, expert=st.booleans())
NUMBERS = st.none() | st.integers(-1, 6)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def groups(draw: st.DrawFn) -> list[Launch]:
    """What every node of one group is told: by nodes, or by replicas, few here and many there."""
    parallel = draw(PARALLEL)
    common = Launch(
        parallel=parallel,
        drafts=draw(st.booleans()),
        data_parallel_address="10.0.0.1",
        master_addr="10.0.0.1",
        weight_cache_master_port=29600,
    )
    if draw(st.booleans()):
        nodes = draw(st.sampled_from(divisors(parallel.data) + divisors(parallel.replica)))
        nodes *= parallel.data if parallel.data % nodes else 1
        return [replace(common, nnodes=nodes, node_rank=n) for n in range(nodes)]
    firsts = sorted(draw(st.sets(st.integers(1, parallel.data - 1)))) if parallel.data > 1 else []
    bounds = [0, *firsts, parallel.data]
    return [
        replace(common, data_parallel_start_rank=a, data_parallel_size_local=b - a)
        for a, b in pairwise(bounds)
    ]


@given(groups())
def test_every_rank_is_launched_once_and_has_coordinates_of_its_own(group):
    nodes = [plan_node(launch) for launch in group]
    assert [rank for node in nodes for rank in node.ranks] == [*range(group[0].parallel.world)]
    placements = [placement for node in nodes for placement in node.placements]
    assert len(set(placements)) == group[0].parallel.world
    assert {node.meeting for node in nodes} == {nodes[0].meeting}
    assert all((node.count > 1) == (len(nodes) > 1) for node in nodes)


@given(
    st.builds(
        Launch,
        parallel=PARALLEL,
        devices=st.none() | st.lists(st.sampled_from(devices(*range(8))), max_size=8).map(tuple),
        drafts=st.booleans(),
        nnodes=NUMBERS,
        node_rank=NUMBERS,
        data_parallel_size_local=NUMBERS,
        data_parallel_start_rank=NUMBERS,
        data_parallel_address=st.sampled_from(["", "localhost", "10.0.0.1"]),
        master_addr=st.sampled_from(["", "127.0.0.1", "10.0.0.1"]),
        weight_cache_master_port=st.none() | st.integers(-1, 3) | st.integers(65530, 65537),
        weight_cache_draft_master_port=st.none() | st.integers(-1, 3) | st.integers(65530, 65537),
        master_port=st.none() | st.integers(1, 3),
    )
)
def test_a_node_is_refused_or_its_ranks_are_the_groups_and_nobody_elses(launch):
    faults = launch_faults(launch)
    if faults:
        assert all(hasattr(launch, fault.setting) for fault in faults)
        parts = [part for fault in faults for part in fault.text.rpartition(": ")]
        assert all(part.strip() for part in parts), "a text without a remedy"
        with pytest.raises(ConfigError):
            plan_node(launch)
        return
    node = plan_node(launch)
    assert set(node.ranks) <= set(range(launch.parallel.world))
    assert 0 <= node.number < node.count
    if launch.devices is not None:
        assert len(set(node.devices)) == len(node.ranks)
    used = [] if launch.master_port is None else [launch.master_port]
    used += [port for port in (node.meeting.port, node.meeting.draft_port) if port is not None]
    assert len(set(used)) == len(used)
    assert all(1 <= port <= 65535 for port in used)
