from preloadd.supervisor.nodes import Node, NodeGroup, NodeRank, Peer
from preloadd.supervisor.peer_metrics import MOST_GROUPS, peer_metrics


def samples(*peers: Peer) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        metric.name: {tuple(sample.labels.values()): sample.value for sample in metric.samples}
        for metric in peer_metrics(peers)
    }


NODE = Node(
    *("1", "node-8", "0.1.0", False, ()),
    (NodeGroup("g", (NodeRank("CPU-0", "serving"), NodeRank("CPU-1", "failed"))),),
)


def test_a_peer_that_answers():
    assert samples(Peer("a:1", NODE, 0.5)) == {
        "preloadd_peer_up": {("a:1",): 1},
        "preloadd_peer_age_seconds": {("a:1",): 0.5},
        "preloadd_peer_healthy": {("a:1",): 0},
        "preloadd_peer_info": {("a:1", "node-8", "0.1.0"): 1},
        "preloadd_peer_group_ranks": {("a:1", "g"): 2},
        "preloadd_peer_group_ranks_serving": {("a:1", "g"): 1},
    }


def test_of_a_silent_peer_only_that_and_for_how_long():
    found = samples(Peer("a:1", NODE, 90.0, "gone"), Peer("b:1", problem="gone"))
    assert found.pop("preloadd_peer_up") == {("a:1",): 0, ("b:1",): 0}
    assert found.pop("preloadd_peer_age_seconds") == {("a:1",): 90}
    assert not any(found.values())


def test_a_peer_with_very_many_groups_is_no_more_than_so_many_series():
    groups = tuple(NodeGroup(f"g{number}", ()) for number in range(MOST_GROUPS + 1))
    found = samples(Peer("a:1", Node(*("1", "node-8", "0.1.0", False, ()), groups), 0.5))
    assert len(found["preloadd_peer_group_ranks"]) == MOST_GROUPS
