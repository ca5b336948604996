from preloadd.supervisor.nodes import LONGEST, Node, NodeGroup, NodeRank, Peer, shown
from tests.unit.supervisor.given import HOSTILE


def test_ranks_serve_by_their_condition_alone():
    conditions = ("serving", "loading", "some later word", "SERVING")
    group = NodeGroup("g", tuple(NodeRank(f"CPU-{n}", c) for n, c in enumerate(conditions)))
    assert (group.serving, len(group.ranks)) == (1, 4)


def test_a_peer_is_reachable_while_nothing_is_wrong():
    node = Node("1", "h", "0", True, (), (NodeGroup("g", ()),))
    assert Peer("a:1", node, 1.0).reachable
    silent = Peer("a:1", node, 9.0, "gone")
    assert not silent.reachable
    assert silent.groups == node.groups, "what it told last stays known"
    assert Peer("a:1", problem="gone").groups == ()


def test_texts_of_others_are_short_and_can_be_seen():
    assert shown("node-7") == "node-7"
    assert shown(HOSTILE).isprintable()
    assert shown("\x1b[2J\u202eabc") == "\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}abc"
    assert len(shown("x" * 10_000)) == LONGEST
    assert shown(shown(HOSTILE)) == shown(HOSTILE)
