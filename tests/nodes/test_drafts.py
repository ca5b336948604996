"""Drafts beside their targets on several hosts, as vLLM has both."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from preloadd.domain.placement import Parallel, place
from tests.engines.vllm import harness
from tests.engines.vllm.harness import Missing
from tests.engines.vllm.test_drafts import eagle, flag, guessing
from tests.engines.vllm.zoo import Zoo
from tests.needs import impossible
from tests.nodes.cluster import Cluster
from tests.nodes.node import PORT, Node
from tests.nodes.shards import Tensors, checkpoint, differing

PATIENCE_S = 300.0
"""Four loaders import a vLLM each, on few processors."""

DISAGREE = 80
PARALLEL = Parallel(tensor=2)
Start = Callable[..., Node]
JOINED = {
    "qkv_proj": {"q_proj": 2, "k_proj": 1, "v_proj": 1},
    "gate_up_proj": {"gate_proj": 1, "up_proj": 1},
}
"""What vLLM joins, and how the rows of each are shared out: there are half as many heads of keys as
of queries."""


@pytest.fixture
def python() -> Path:
    """The interpreter with vLLM."""
    try:
        return harness.vllm_python()
    except Missing as missing:
        impossible(f"vLLM: {missing}")


@pytest.fixture
def target() -> Iterator[Path]:
    """A tiny Llama."""
    with Zoo() as zoo:
        yield zoo("llama")


@pytest.fixture
def draft(target: Path, tmp_path: Path) -> Path:
    """What guesses for it."""
    return eagle(target, tmp_path / "draft")


@pytest.fixture
def start(cluster: Callable[..., Cluster], python: Path, target: Path, draft: Path) -> Start:
    """Starts the node of a number, of two on the `hosts` of it, with flags of its own."""
    hosts = cluster(2)
    flags = ["--tensor-parallel-size", "2", *flag(guessing(draft))]
    flags += ["--builder", "vllm", "--python", str(python)]
    cache = {"VLLM_CACHE_ROOT": str(python.parents[1] / "cache")}
    limits = {"rendezvous": PATIENCE_S}

    def start(number: int, *own: str) -> Node:
        more = {"limits": limits, "patience": PATIENCE_S, "environ": cache}
        return hosts.start(number, *flags, *own, model=target, **more)

    start.hosts = hosts
    return start


@pytest.mark.timeout(PATIENCE_S)
def test_two_hosts_hold_half_of_a_target_and_of_its_draft_each(start, target, draft):
    hosts = start.hosts
    nodes = [start(0), start(1)]
    for node in nodes:
        node.serving()
    assert sorted(hosts.hosts[0].listening) == [PORT, PORT + 1]
    both = {"CPU-0": (target, checkpoint(target)), "CPU-0.draft": (draft, renamed(draft))}
    for instance, (model, stored) in both.items():
        parts = []
        for rank, node in enumerate(nodes):
            told = node.status(instance)
            assert (told.model, told.key["tp_rank"]) == (str(model), str(rank))
            found = node.attach(place(PARALLEL, rank), instance, model=model, key=told.key)
            parts.append(separated(found))
        assert differing(parts, stored) == []
    nodes[1].signal_rank(signal.SIGKILL, "CPU-0.draft")
    assert nodes[1].ended() == 128 + signal.SIGKILL
    for instance in both:
        assert nodes[0].status(instance).state == "serving"
    assert nodes[0].stop() == 143
    hosts.clean()


@pytest.mark.timeout(PATIENCE_S)
def test_a_node_that_has_no_draft_where_the_other_has_one_ends_both(start):
    nodes = [start(0), start(1, "--no-draft")]
    # Whoever comes last is told to differ from those that are there.
    sides = ["'held' for rank 0 of node 0", "'not held' for rank 1 of node 1"]
    orders = [f"draft is {late} but {early}: give all" for late, early in (sides, sides[::-1])]
    told = []
    for node in nodes:
        assert node.ended(PATIENCE_S) == DISAGREE, node.told
        told.append([order for order in orders if order in node.told])
    assert told[0] == told[1] in ([orders[0]], [orders[1]])
    start.hosts.clean()


def renamed(draft: Path) -> Tensors:
    """A draft's checkpoint by vLLM's names."""
    return {f"model.{name}": tensor for name, tensor in checkpoint(draft).items()}


def separated(part: Tensors) -> Tensors:
    """One rank's part by the names of checkpoints: vLLM joins some tensors of one layer."""
    found = {}
    for name, tensor in part.items():
        joined = next((joined for joined in JOINED if joined in name), "")
        shares = JOINED.get(joined, {joined: 1})
        each = len(tensor) // sum(shares.values())
        ends = np.cumsum([each * share for share in shares.values()])[:-1]
        for own, rows in zip(shares, np.split(tensor, ends), strict=True):
            found[name.replace(joined, own)] = rows
    return found
