"""The rule by which a peer or the disk is chosen, and the measuring of a real disk."""

import math

import pytest

from preloadd.errors import ReadFailed
from preloadd.loader.race import Rule, disk_pace
from preloadd.weights.checkpoint import open_checkpoint
from tests.checkpoints import SHARDS, llama, sparse

RULE = Rule()
GB = 10**9


def test_a_disk_that_needs_less_than_asking_costs_is_not_left():
    assert not RULE.asks(GB, disk=GB)
    assert RULE.asks(2 * GB, disk=GB)
    assert RULE.asks(1, disk=0.0)


def test_the_faster_one_goes_on_after_the_trial():
    assert RULE.keeps(100 * GB, GB, came=0, seconds=0.4)
    assert not RULE.keeps(100 * GB, GB, came=GB // 2 - 1, seconds=0.5)
    assert RULE.keeps(100 * GB, GB, came=GB, seconds=0.5)
    assert RULE.keeps(100 * GB, 0.0, came=0, seconds=60.0)


def test_a_peer_may_not_take_twice_what_the_disk_would():
    assert RULE.keeps(100 * GB, GB, came=300 * GB, seconds=199.0)
    assert not RULE.keeps(100 * GB, GB, came=300 * GB, seconds=200.0)
    assert RULE.keeps(2 * GB, GB, came=300 * GB, seconds=4.9)


@pytest.mark.parametrize(
    ("nbytes", "disk", "seconds"), [(2 * GB, GB, 1.0), (12 * GB, GB, 3.0), (GB, 0.0, 5.0)]
)
def test_little_is_lost_where_nobody_answers(nbytes, disk, seconds):
    assert math.isclose(RULE.patience_s(nbytes, disk), seconds)


@pytest.mark.parametrize("direct", [False, True])
def test_a_disk_is_measured_as_it_is_read(tmp_path, direct):
    shards = open_checkpoint(llama(tmp_path / "model")).shards
    assert disk_pace(shards, threads=2, direct=direct) > 0
    (tmp_path / "model" / SHARDS[0]).write_bytes(b"")
    with pytest.raises(ReadFailed, match=SHARDS[0]):
        disk_pace(shards, threads=2, direct=direct)


def test_of_a_large_checkpoint_a_sample_is_read(tmp_path):
    shards = open_checkpoint(sparse(tmp_path / "model", 1 << 40)).shards
    assert disk_pace(shards, threads=2, direct=False) > 0
