"""What one supervisor writes another reads; what it could not have written is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.errors import ProtocolViolation
from preloadd.supervisor.introduction import LIMIT, MAX_REASONS, NodeIntroduced, read
from preloadd.supervisor.nodes import MAX_RANKS, NodeGroup, NodeRank, shown
from preloadd.supervisor.verdict import Contact, Snapshot
from tests.unit.supervisor.given import HOSTILE

NODE = {
    "identity": "1",
    "host": "node-8",
    "version": "0.1.0",
    "healthy": True,
    "reasons": [],
    "groups": [{"name": "g", "ranks": [{"instance": "CPU-0", "condition": "serving"}]}],
}


def body(ranks) -> bytes:
    told = NodeIntroduced.of(ranks, identity="1" * 32, host="node-8", version="0.1.0")
    return told.model_dump_json().encode()


def test_what_is_told_is_read_back(crowd):
    node = read(body(crowd.ranks))
    assert (node.identity, node.host, node.version) == ("1" * 32, "node-8", "0.1.0")
    assert not node.healthy
    assert len(node.reasons) == 3
    good, hostile, gone = node.groups
    assert good == NodeGroup("good", (NodeRank("GPU-a", "serving"),))
    assert hostile.name == shown(HOSTILE)
    assert [rank.condition for rank in hostile.ranks] == ["loading", "stuck"]
    assert gone.ranks == (NodeRank("CPU-1", "failed"),)


def test_of_peers_nothing_is_told(crowd):
    assert crowd.peers
    told = body(crowd.ranks).decode()
    assert not [peer.address for peer in crowd.peers if peer.address in told]
    assert read(json.dumps({**NODE, "peers": [NODE], "later": 1}).encode()).groups


def test_as_many_ranks_as_a_host_may_have_fit():
    name = "GPU-53b1d48b-de77-970d-5f91-576155feee6c.draft"
    ranks = [
        Snapshot(name, contact=Contact.ABSENT, group="g" * 64, problem="x" * 5000)
        for _ in range(MAX_RANKS)
    ]
    told = body(ranks)
    assert len(told) < LIMIT / 2
    assert len(read(told).reasons) == MAX_REASONS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"healthy": "yes"}, "healthy: "),
        ({"healthy": 1}, "healthy: "),
        ({"host": None}, "host: "),
        ({"groups": {}}, "groups: "),
        ({"groups": [{"name": "g", "ranks": [{"instance": 1, "condition": "x"}]}]}, "instance: "),
        ({"groups": [{"name": "g", "ranks": []}] * 2}, "a group twice"),
        ({"groups": [{"name": f"g{c}", "ranks": []} for c in "\x00\x01"]}, "a group twice"),
        ({"groups": [{"name": str(n), "ranks": []} for n in range(MAX_RANKS + 1)]}, "groups: "),
        ({"reasons": ["x"] * (MAX_REASONS + 1)}, "reasons: "),
    ],
)
def test_what_is_not_how_a_node_is(change, said):
    with pytest.raises(ProtocolViolation, match="what it answers is not how a node is: ") as caught:
        read(json.dumps({**NODE, **change}).encode())
    assert said in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"<html>", b"\xff\xfe", b"null", b"[" * 100_000, b"1e999"])
def test_garbage(text):
    with pytest.raises(ProtocolViolation, match="what it answers is not how a node is: ") as caught:
        read(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_fault_has_none_of_the_peers_words():
    with pytest.raises(ProtocolViolation) as caught:
        read(json.dumps({**NODE, "healthy": HOSTILE}).encode())
    assert "script" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.fixed_dictionaries({}, optional={name: JSON | st.just(NODE[name]) for name in NODE}))
def test_whatever_is_read_can_be_shown(told):
    try:
        node = read(json.dumps(told).encode())
    except ProtocolViolation:
        return
    names = [node.host, node.version, *node.reasons, *(group.name for group in node.groups)]
    assert all(name.isprintable() or not name for name in names)
