from dataclasses import replace
from datetime import UTC, datetime
from html import escape

import pytest

from preloadd.supervisor import node_panel
from preloadd.supervisor.lookout import View
from preloadd.supervisor.nodes import Node, NodeGroup, NodeRank, Peer, shown
from tests.unit.supervisor.given import HOSTILE


def drawn(*peers: Peer) -> str:
    return node_panel.nodes(View(datetime.now(UTC), peers=peers)) or ""


def test_without_peers_there_is_no_panel():
    assert node_panel.nodes(View(datetime.now(UTC))) is None


def test_every_kind_of_node_says_how_it_is_and_how_old_that_is(crowd):
    text = node_panel.nodes(crowd)
    assert text is not None
    for part in (
        "2 of 4 answer",
        "node-8:9470 · preloadd 0.1.0 · heard 1 s ago",
        'badge good">healthy',
        'badge bad">unhealthy',
        'badge bad">no answer',
        "8 of 8 serving",
        "3 of 4 serving",
        "heard 3 min ago",
        "never heard",
        'class="why">connection refused',
    ):
        assert part in text
    assert escape(shown(HOSTILE)) in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("conditions", "tone"),
    [
        (["serving", "loading"], "busy"),
        (["serving", "failed"], "bad"),
        (["a later word"], "bad"),
        ([], "bad"),
    ],
)
def test_a_node_is_as_bad_as_its_worst_rank(conditions, tone):
    ranks = tuple(NodeRank(f"CPU-{n}", condition) for n, condition in enumerate(conditions))
    node = Node("1", "h", "0", False, (), (NodeGroup("g", ranks),))
    assert f'badge {tone}">unhealthy' in drawn(Peer("a:1", node, 0.0))


def test_a_node_without_groups_and_one_with_many():
    node = Node("1", "", "0", False, ("no rank is being watched",), ())
    text = drawn(Peer("a:1", node, 0.0))
    assert "<h3>a:1</h3>" in text
    assert "no group" in text
    groups = tuple(NodeGroup(f"g{n}", ()) for n in range(12))
    assert "and 4 more" in drawn(Peer("a:1", replace(node, groups=groups), 0.0))
