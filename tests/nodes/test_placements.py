"""Groups that are divided over hosts: what their engines find makes the checkpoint again."""

from pathlib import Path

import pytest

from preloadd.domain.placement import ExpertPlacement, Parallel, place
from tests.nodes.node import PORT, Node
from tests.nodes.shards import Tensors, checkpoint, differing, wholes

EXPERTS = "model.layers.0.mlp.experts."


def attached(nodes: list[Node], parallel: Parallel) -> list[Tensors]:
    """What engines find, one for each rank, in the order of ranks."""
    return [node.attach(place(parallel, rank)) for rank, node in enumerate(nodes)]


def assert_together_equal(parts: list[Tensors], folder: Path) -> None:
    """Whatever is in the checkpoint is there, once or several times, and nothing else."""
    stored = checkpoint(folder)
    assert set().union(*parts) == stored.keys()
    assert differing(parts, stored) == []


def stop(cluster, nodes: list[Node]) -> None:
    """End all, one after the other, whatever the others do."""
    for node in nodes:
        assert node.stop() == 143
    cluster.clean()


def test_three_hosts_hold_a_third_of_every_layer_each(cluster, smollm2):
    hosts = cluster(3)
    nodes = hosts.start_all("--tensor-parallel-size", "3", model=smollm2)
    parts = attached(nodes, Parallel(tensor=3))
    assert_together_equal(parts, smollm2)
    whole = sum(array.nbytes for array in checkpoint(smollm2).values())
    for part in parts:
        assert sum(array.nbytes for array in part.values()) < whole * 0.34
    stop(hosts, nodes)


def test_four_hosts_hold_two_replicas_with_one_set_of_experts(cluster, experts):
    hosts = cluster(4)
    sizes = ("--data-parallel-size", "2", "--tensor-parallel-size", "2")
    nodes = hosts.start_all(*sizes, model=experts)
    parts = attached(nodes, Parallel(data=2, tensor=2))
    found = dict(wholes(parts, checkpoint(experts)))
    assert_together_equal(parts, experts)
    assert len(found["model.layers.0.self_attn.q_proj.weight"]) == 2
    assert len(found[f"{EXPERTS}3.gate_proj.weight"]) == 1
    stop(hosts, nodes)


@pytest.mark.parametrize(
    ("strategy", "dealt"),
    [("linear", [{0, 1}, {2, 3}]), ("round_robin", [{0, 2}, {1, 3}])],
)
def test_two_hosts_hold_whole_experts_in_blocks_or_in_turns(cluster, experts, strategy, dealt):
    hosts = cluster(2)
    flags = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    nodes = hosts.start_all(*flags, "--expert-placement-strategy", strategy, model=experts)
    placement = ExpertPlacement(strategy)
    parts = attached(nodes, Parallel(tensor=2, expert=True, expert_placement=placement))
    assert numbers(parts) == dealt
    assert_together_equal(parts, experts)
    stop(hosts, nodes)


def test_two_hosts_hold_a_replica_each_and_half_of_the_experts(cluster, experts):
    hosts = cluster(2)
    flags = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    flags += ("--data-parallel-address", hosts.hosts[0].address, "--enable-expert-parallel")
    flags += ("--weight-cache-master-port", str(PORT), "--data-parallel-start-rank")
    nodes = [hosts.start_at(number, *flags, str(number), model=experts) for number in (1, 0)]
    for node in nodes:
        node.serving()
    parts = attached(nodes[::-1], Parallel(data=2, expert=True))
    assert numbers(parts) == [{0, 1}, {2, 3}]
    assert_together_equal(parts, experts)
    stop(hosts, nodes)


def test_two_hosts_hold_the_first_and_the_last_layers(cluster, model):
    hosts = cluster(2)
    nodes = hosts.start_all("--pipeline-parallel-size", "2")
    first, last = parts = attached(nodes, Parallel(pipeline=2))
    assert not first.keys() & last.keys()
    assert "model.embed_tokens.weight" in first
    assert "lm_head.weight" in last
    assert_together_equal(parts, model)
    stop(hosts, nodes)


def test_two_hosts_of_two_ranks_hold_a_quarter_each(cluster, experts):
    hosts = cluster(2)
    nodes = hosts.start_all(
        "--data-parallel-size", "2", "--tensor-parallel-size", "2", "-ep", model=experts
    )
    parallel = Parallel(data=2, tensor=2, expert=True)
    parts = [
        node.attach(place(parallel, 2 * number + local), f"CPU-{local}")
        for number, node in enumerate(nodes)
        for local in range(2)
    ]
    assert numbers(parts) == [{0}, {1}, {2}, {3}]
    assert_together_equal(parts, experts)
    stop(hosts, nodes)


def numbers(parts: list[Tensors]) -> list[set[int]]:
    """Of each rank, the experts of the first layer that it holds."""
    return [
        {
            int(name.removeprefix(EXPERTS).partition(".")[0])
            for name in part
            if name.startswith(EXPERTS)
        }
        for part in parts
    ]
