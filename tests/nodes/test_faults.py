"""What goes wrong on one host of several: who ends, how soon, with what words, and who goes on."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import preloadd
from preloadd.domain.placement import Parallel, place
from tests.checkpoints import llama
from tests.nodes.cluster import Cluster
from tests.nodes.hosts import Host
from tests.nodes.node import PORT, Node

DISAGREE = 80
NOT_FOUND = 66
KILLED = 128 + signal.SIGKILL
SOON_S = 15.0
"""How long an end may take of which the reason is there: much longer than it needs, and much less
than any deadline that is not shortened."""

SILENCE_S = 2.0
"""How long ranks of these groups may be silent."""

STAGES = Parallel(pipeline=3)
FLAGS = ("--pipeline-parallel-size", "3")
HALVES = ("--tensor-parallel-size", "2")
STRANGER = "import socket; taken = socket"
SHORT = {"rendezvous": 4.0}


@pytest.fixture
def three(cluster: Callable[..., Cluster]) -> Cluster:
    """Hosts for a group of three stages."""
    return cluster(3, peer_silence=SILENCE_S)


@pytest.fixture
def gathering(three: Cluster) -> list[Node]:
    """Two nodes that wait for the third."""
    return gathered(three)


@pytest.fixture
def loading(three: Cluster) -> list[Node]:
    """Two nodes whose loads do not go on, and a third that serves already."""
    nodes = gathered(three)
    for node in nodes:
        node.signal_loader(signal.SIGSTOP)
    nodes.append(three.start(2, *FLAGS))
    nodes[2].serving()
    return nodes


@pytest.fixture
def serving(three: Cluster) -> list[Node]:
    """Three nodes that serve."""
    return three.start_all(*FLAGS)


def gathered(three: Cluster) -> list[Node]:
    first = three.start(0, *FLAGS)
    first.waits_for("ranks 1, 2 of nodes 1, 2")
    second = three.start(1, *FLAGS)
    for node in (first, second):
        node.waits_for("rank 2 of node 2")
    return [first, second]


@contextmanager
def stuck_digests(host: Host) -> Iterator[None]:
    """In this block no loader on this host gets past reading all content, for want of a lock."""
    folder = host.folder / "cache" / "preloadd" / "digests"
    folder.mkdir(mode=0o700, parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def assert_ended(node: Node, *words: str) -> None:
    """It has ended soon, for one reason that is told in these words."""
    assert node.ended(SOON_S) == DISAGREE, node.told
    for word in words:
        assert word in node.why, node.why


def assert_goes_on(nodes: list[Node]) -> None:
    """These serve, and engines attach to what each holds."""
    for node in nodes:
        assert node.attach(place(STAGES, node.host.number)), node.told


# -- a node that is lost --


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_gone_before_the_others_come_is_named_by_them(three, victim):
    lost = three.start(victim, *FLAGS)
    lost.waits_for("rank 0 of node 0" if victim else "ranks 1, 2 of nodes 1, 2")
    lost.host.power_off()
    others = [three.start(number, *FLAGS, limits=SHORT) for number in {0, 1, 2} - {victim}]
    who = "rank 1 of node 1 did not come to" if victim else "rank 0 of node 0 was not reached at"
    for node in others:
        assert_ended(node, f"{who} 192.0.2.1:{PORT} within 4 s", "firewall")
    three.clean()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_lost_while_all_gather_ends_the_others(three, gathering, victim):
    gathering[victim].host.power_off()
    assert_ended(gathering[1 - victim], f"rank {victim}", "was lost while gathering")
    three.clean()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_lost_while_all_load_ends_those_that_still_do(three, loading, victim):
    loading[victim].host.power_off()
    assert_ended(loading[1 - victim], f"rank {victim}", "was lost while loading")
    assert_goes_on(loading[2:])
    assert loading[2].stop() == 143
    three.clean()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_lost_while_all_serve_is_no_harm(three, serving, victim):
    lost = serving.pop(victim)
    lost.host.power_off()
    time.sleep(2 * SILENCE_S)
    assert_goes_on(serving)
    for node in serving:
        assert node.stop() == 143
    three.clean()


# -- a node that is wrong --


@pytest.fixture
def two(cluster: Callable[..., Cluster]) -> Cluster:
    """Hosts for a group of two ranks."""
    return cluster(2, peer_silence=SILENCE_S)


def after_the_first(two: Cluster, *flags: str, **more) -> list[Node]:
    """Two nodes, of which the second is started in another way, once the first waits for it."""
    first = two.start(0, *HALVES)
    first.waits_for("rank 1 of node 1")
    return [first, two.start(1, *flags, **more)]


def test_a_node_with_another_checkpoint_ends_all_and_both_values_are_told(two, tmp_path):
    (tmp_path / "other").mkdir()
    other = llama(tmp_path / "other" / "model", seed=1)
    nodes = after_the_first(two, *HALVES, model=other)
    for node in nodes:
        assert_ended(node, "checkpoint is 'sampled", "for rank 1 of node 1", "for rank 0 of node 0")
        assert "give all nodes the same model" in node.why
    two.clean()


def test_others_that_disagree_before_rank_0_has_looked_are_told_of_there_as_well(three, tmp_path):
    (tmp_path / "other").mkdir()
    other = llama(tmp_path / "other" / "model", seed=1)
    with stuck_digests(three.hosts[0]):
        first = three.start(0, *FLAGS, "--digest", "full")
        first.until(lambda: PORT in first.host.listening, "port")
        nodes = [
            three.start(number, *FLAGS, "--digest", "full", model=model)
            for number, model in ((1, None), (2, other))
        ]
        for node in nodes:
            assert_ended(node, "checkpoint is 'full", "give all nodes the same model")
        assert_ended(first, "checkpoint is 'full", "give all nodes the same model")
    three.clean()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_without_the_checkpoint_ends_all_in_its_own_words(two, tmp_path, victim):
    gone = tmp_path / "gone"
    nodes = [two.start(n, *HALVES, model=gone if n == victim else None) for n in (0, 1)]
    assert nodes[victim].ended(SOON_S) == NOT_FOUND
    assert f"{gone}: no such folder: correct the path" in nodes[victim].why
    told = f"rank {victim} of node {victim} failed: {gone}: no such folder: correct the path"
    assert_ended(nodes[1 - victim], told)
    two.clean()


def test_nodes_may_call_the_group_differently(two, model):
    other = model.with_name("copy")
    other.symlink_to(model)
    nodes = [two.start(0, *HALVES), two.start(1, *HALVES, model=other)]
    for node in nodes:
        node.serving()
    for node in nodes:
        assert node.stop() == 143
    two.clean()


def test_a_node_with_another_version_ends_all_and_both_are_told(two):
    nodes = after_the_first(two, *HALVES, version="0.0.7")
    for node in nodes:
        own = f"but {preloadd.__version__!r} for rank 0 of node 0"
        assert_ended(node, f"preloadd is '0.0.7' for rank 1 of node 1 {own}")
    two.clean()


def test_a_node_that_divides_otherwise_ends_all(two):
    nodes = after_the_first(two, "--pipeline-parallel-size", "2")
    for node in nodes:
        assert_ended(node, "tp_size is '1' for rank 1 of node 1 but '2' for rank 0 of node 0")
    two.clean()


def test_a_node_of_another_world_is_turned_away_and_told_of_with_the_missing(two):
    first = two.start(0, *HALVES, limits=SHORT)
    first.waits_for("rank 1 of node 1")
    wrong = two.start(1, "--pipeline-parallel-size", "4")
    assert wrong.ended(SOON_S) == DISAGREE, wrong.told
    told = "of 4 ranks on 2 nodes, rank 0 of 2 ranks on 2 nodes: give all nodes the same sizes"
    assert told in wrong.told
    assert_ended(first, "rank 1 of node 1 did not come", told)
    two.clean()


def test_a_node_with_the_number_of_another_is_turned_away_and_does_not_disturb(three):
    first = three.start(0, *FLAGS)
    first.waits_for("ranks 1, 2 of nodes 1, 2")
    second = three.start(1, *FLAGS)
    second.waits_for("rank 2 of node 2")
    where = ("--nnodes", "3", "--node-rank", "1", "--master-addr", three.hosts[0].address)
    where += ("--weight-cache-master-port", str(PORT))
    double = three.start_at(2, *where, *FLAGS)
    assert_ended(double, "rank 1 of node 1 is here already: give each node a number of its own")
    nodes = [first, second, three.start(2, *FLAGS)]
    for node in nodes:
        node.serving()
    assert_goes_on(nodes)


def test_a_second_node_that_takes_itself_for_the_first_is_told_so_and_does_not_disturb(two):
    first = two.start(0, *HALVES)
    first.waits_for("rank 1 of node 1")
    where = ("--nnodes", "2", "--node-rank", "0", "--master-addr", two.hosts[0].address)
    double = two.start_at(1, *where, "--weight-cache-master-port", str(PORT), *HALVES)
    told = "192.0.2.1 is no address of this host, which has rank 0"
    assert_ended(double, told, "if this is not the first node, give it a node_rank")
    nodes = [first, two.start(1, *HALVES)]
    for node in nodes:
        node.serving()
    for node in nodes:
        assert node.stop() == 143
    two.clean()


def test_a_taken_port_is_named_on_its_host_and_all_others_end(two):
    words = [sys.executable, "-Ic", f"{STRANGER}.create_server(('', {PORT})); input()"]
    host = two.hosts[0]
    stranger = host.start(words, host.folder / "stranger", os.environ, stdin=subprocess.PIPE)
    with stranger:
        while PORT not in host.listening:
            assert stranger.poll() is None, (host.folder / "stranger").read_text()
        second = two.start(1, *HALVES, limits=SHORT)
        assert_ended(two.start(0, *HALVES), f"port {PORT} is taken", "give all nodes another")
        assert_ended(second, f"rank 0 of node 0 gave no answer: what listens at 192.0.2.1:{PORT}")
        stranger.communicate(b"\n")
    two.clean()


# -- a network that is cut --


def test_a_cut_while_all_load_ends_the_load_on_both_sides(three, loading):
    three.network.unplug(three.hosts[1])
    assert_ended(loading[0], "rank 1 of node 1 was lost while loading: it was silent for 2 s")
    assert_ended(loading[1], "rank 0 of node 0 was lost while loading: it was silent for 2 s")
    assert_goes_on(loading[2:])
    three.network.plug(three.hosts[1])
    again = [three.start(number, *FLAGS) for number in (0, 1)]
    for node in again:
        node.serving()
    assert_goes_on([*again, loading[2]])


def test_a_cut_while_all_gather_ends_both_sides(three, gathering):
    three.network.unplug(three.hosts[1])
    assert_ended(gathering[0], "rank 1 of node 1 was lost while gathering: it was silent for 2 s")
    assert_ended(gathering[1], "rank 0 of node 0 was lost while gathering: it was silent for 2 s")
    three.clean()


def test_a_cut_while_all_serve_is_no_harm_and_heals(three, serving):
    three.network.unplug(three.hosts[1])
    time.sleep(2 * SILENCE_S)
    assert_goes_on(serving)
    three.network.plug(three.hosts[1])
    assert serving[2].stop() == 143
    again = three.start(2, *FLAGS)
    again.serving()
    assert_goes_on([serving[0], serving[1], again])


# -- one rank that is killed --


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_all_identify(three, victim):
    hosts = three.hosts
    with stuck_digests(hosts[0]), stuck_digests(hosts[1]):
        nodes = [three.start(number, *FLAGS, "--digest", "full") for number in (0, 1)]
        nodes[0].until(lambda: PORT in hosts[0].connected, "connection")
        nodes[1].until(lambda: hosts[1].running("preloadd.loader"), "loader")
        nodes[victim].signal_rank(signal.SIGKILL)
        assert nodes[victim].ended(SOON_S) == KILLED
        assert_ended(nodes[1 - victim], f"rank {victim} of node {victim}", "hung up")
    three.clean()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_all_gather(three, gathering, victim):
    gathering[victim].signal_rank(signal.SIGKILL)
    assert gathering[victim].ended(SOON_S) == KILLED
    assert "SIGKILL" in gathering[victim].told
    assert_ended(gathering[1 - victim], f"rank {victim}", "was lost while gathering: it hung up")
    three.clean()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_all_load(three, loading, victim):
    loading[victim].signal_rank(signal.SIGKILL)
    assert loading[victim].ended(SOON_S) == KILLED
    assert_ended(loading[1 - victim], f"rank {victim}", "was lost while loading: it hung up")
    assert_goes_on(loading[2:])
    assert loading[2].stop() == 143
    three.clean()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_all_serve_comes_back_by_a_load_of_its_own(
    three, serving, victim
):
    lost = serving.pop(victim)
    lost.signal_rank(signal.SIGKILL)
    assert lost.ended(SOON_S) == KILLED
    assert_goes_on(serving)
    back = three.start(victim, *FLAGS)
    back.serving()
    assert_goes_on([*serving, back])
    for node in (*serving, back):
        assert node.stop() == 143
    three.clean()


def test_a_rank_that_is_killed_and_adopts_needs_nobody(two):
    first, second = two.start_all(*HALVES, "--restart-ranks")
    before = second.status()
    first.host.power_off()
    second.signal_rank(signal.SIGKILL)
    second.until(lambda: second.serves and second.status().pid != before.pid, "another life")
    assert second.status().adopted
    assert second.status().generation == before.generation
    assert second.attach(place(Parallel(tensor=2), 1))
    assert second.stop() == 143
    two.clean()
