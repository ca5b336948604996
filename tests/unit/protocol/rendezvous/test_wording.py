from preloadd.protocol.rendezvous.wording import did_not_come, missing_named, ranks_named
from tests.unit.protocol.rendezvous.ranks import at


def test_ranks_and_nodes_are_counted_out():
    assert ranks_named([3, 5], [1, 2, 1]) == "ranks 3, 5 of nodes 1, 2"
    assert ranks_named([3], [1]) == "rank 3 of node 1"
    assert ranks_named([3], [], "draft") == "draft rank 3"
    assert ranks_named(range(20), [0]).startswith("ranks 0, 1")
    assert "15, …" in ranks_named(range(20), [0])


def test_missing_ranks_are_named_with_their_nodes():
    assert missing_named((3, 5), at(0, world=6, nodes=3)) == "ranks 3, 5 of nodes 1, 2"
    assert missing_named((3, 5), at(0, world=6, nodes=0)) == "ranks 3, 5"


def test_who_did_not_come_is_named_if_that_is_known():
    told = did_not_come((3,), at(0), 60.0)
    assert told.startswith("rank 3 of node 1 did not come to 10.0.0.1:29700 within 60 s: see ")
    assert did_not_come((), at(0), 60.0) == told.replace("rank 3 of node 1", "the others")
