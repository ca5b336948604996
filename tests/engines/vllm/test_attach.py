"""vLLM over attached weights says bit for bit what it says over its own from disk."""

import statistics
import time

import pytest

from tests.engines.vllm.harness import Raised, attaching
from tests.engines.vllm.zoo import KINDS

pytestmark = pytest.mark.slow

FORMS = ["llama", "mixtral", "deepseek-v2"]
"""What is told apart by layouts: linear layers, experts, and attention that makes tensors late."""


@pytest.fixture(params=[*KINDS, "smollm2"])
def model(request, zoo):
    """A model of every kind, and the demo model."""
    kind = request.param
    return request.getfixturevalue("smollm2") if kind == "smollm2" else zoo(kind)


def eventually(holds):
    deadline = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_way_to_the_weights_gives_the_tokens_and_logprobs_of_a_load_from_disk(
    model, daemon, engine, lasting
):
    first, second = engine(), lasting
    rank = daemon(model)
    assert first.load(model).shared == 0
    said = first.generate()
    assert first.generate() == said

    rank.serving("CPU-0")
    for one in (first, second):
        loaded = one.attach(model, rank.sockets)
        assert not loaded.reason
        assert loaded.shared > 10 * loaded.private
        assert loaded.arena_anonymous == 0
        assert one.generate() == said
    assert rank.status().lease_count == 2
    assert first.memory()["arena_anonymous"] == 0

    generation = rank.status().generation
    adopted = rank.kill_rank()
    assert adopted.bytes_read == 0
    assert (rank.status().generation, rank.status().lease_count) == (generation, 2)
    assert first.generate() == said
    assert not first.attach(model, rank.sockets).reason
    assert first.generate() == said

    first.kill()
    eventually(lambda: rank.status().lease_count == 1)
    assert second.generate() == said
    assert not second.attach(model, rank.sockets).reason
    assert second.generate() == said
    assert rank.status().generation == generation

    copied = second.attach(model, rank.sockets, mode="copy")
    assert not copied.reason
    assert copied.shared == 0
    told = rank.status()
    assert (told.state, told.arena_bytes, told.lease_count) == ("released", 0, 0)
    assert second.generate() == said


def test_unprocessed_weights_are_processed_by_every_engine_for_itself(zoo, daemon, lasting):
    for kind in FORMS:
        rank = daemon(zoo(kind), "--layout", "raw")
        lasting.load(zoo(kind))
        said = lasting.generate()
        rank.serving("CPU-0")
        for _ in range(2):
            loaded = lasting.attach(zoo(kind), rank.sockets)
            assert not loaded.reason
            assert lasting.generate() == said
        assert rank.status().lease_count == 1
        lasting.drop()
        rank.close()


def test_an_engine_that_nobody_serves_loads_from_disk_and_says_where_it_looked(
    zoo, lasting, socket_dir
):
    lasting.load(zoo("llama"))
    said = lasting.generate()
    loaded = lasting.attach(zoo("llama"), socket_dir)
    assert str(socket_dir / "CPU-0/rank.sock") in loaded.reason
    assert lasting.generate() == said
    with pytest.raises(Raised, match=str(socket_dir)):
        lasting.attach(zoo("llama"), socket_dir, fallback=False, state_timeout_s=0.0)
    # One that failed leaves the process fit for the next.
    lasting.load(zoo("llama"))
    assert lasting.generate() == said


def test_an_engine_that_must_not_fall_back_waits_for_the_daemon(zoo, daemon, lasting, socket_dir):
    lasting.load(zoo("llama"))
    said = lasting.generate()
    sockets = socket_dir / "0/sockets"  # where the first daemon's will be
    lasting.begin_load(zoo("llama"), **attaching(sockets, fallback=False, state_timeout_s=60.0))
    time.sleep(1.0)
    rank = daemon(zoo("llama"))
    assert rank.sockets == sockets
    loaded = lasting.loaded()
    assert not loaded.reason
    assert loaded.shared > 0
    assert lasting.generate() == said


def test_an_engine_before_the_daemon_is_ready_loads_from_disk_and_says_so(smollm2, daemon, lasting):
    lasting.load(smollm2)
    rank = daemon(smollm2)
    loaded = lasting.attach(smollm2, rank.sockets)
    assert str(rank.sockets / "CPU-0/rank.sock") in loaded.reason
    assert loaded.shared == 0
    (told,) = rank.serving("CPU-0")
    assert told.lease_count == 0
    assert not lasting.attach(smollm2, rank.sockets).reason
    assert rank.status().lease_count == 1


def test_attaching_is_faster_than_a_load_from_disk_and_costs_no_memory(smollm2, daemon, engine):
    """As it is for vLLM's users: nothing is done for the collector here. The files are cached."""
    one = engine(as_it_is=True)
    rank = daemon(smollm2)
    one.load(smollm2)
    from_disk = [one.load(smollm2).load_ms for _ in range(3)]
    rank.serving("CPU-0")
    one.attach(smollm2, rank.sockets)
    attached = [one.attach(smollm2, rank.sockets) for _ in range(3)]
    took = [loaded.load_ms for loaded in attached]
    print(f"load_model, ms: disk {from_disk}, attached {took}; {attached[-1]}")
    assert statistics.median(from_disk) >= 3 * statistics.median(took)

    other = engine(as_it_is=True)
    first = other.attach(smollm2, rank.sockets)
    nbytes = rank.status().tensor_bytes
    assert first.shared >= 0.99 * nbytes
    assert first.private <= 0.05 * nbytes
    # The first load of a process also makes what vLLM keeps for every later one.
    assert attached[-1].grown - attached[-1].private <= 0.05 * nbytes
    assert other.memory()["arena_anonymous"] == 0
