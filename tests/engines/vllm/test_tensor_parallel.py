"""Two ranks, each with its own daemon: vLLM in several processes, as it is without a test."""

import pytest

pytestmark = pytest.mark.slow

TWO = {"tensor_parallel_size": 2}
RANKS = ("CPU-0", "CPU-1")


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_two_ranks_say_what_two_ranks_say_from_disk(kind, zoo, group, lasting):
    model = zoo(kind)
    ranks = group(model, "--tensor-parallel-size", "2")
    lasting.load(model, **TWO)
    said = lasting.generate()
    ranks.serving(*RANKS)
    assert not lasting.attach(model, ranks.sockets, also=TWO).reason
    assert [ranks.status(rank).lease_count for rank in RANKS] == [1, 1]
    assert lasting.generate() == said


def test_the_weights_of_another_rank_are_refused(zoo, group, engine):
    model = zoo("llama")
    one = engine(PRELOADD_DEVICES="CPU-1,CPU-0")  # the wrong way round
    ranks = group(model, "--tensor-parallel-size", "2")
    one.load(model, **TWO)
    said = one.generate()
    ranks.serving(*RANKS)
    loaded = one.attach(model, ranks.sockets, also=TWO)
    assert "tp_rank: daemon has '1', engine wants '0'" in loaded.reason
    assert "tp_rank: daemon has '0', engine wants '1'" in loaded.reason
    assert [ranks.status(rank).lease_count for rank in RANKS] == [0, 0]
    assert one.generate() == said
