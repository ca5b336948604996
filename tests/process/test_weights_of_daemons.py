"""Two rank daemons on one host: what the first has loaded, the second fills its arena from."""

import pytest

from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Seeding
from preloadd.protocol import messages as m
from tests.checkpoints import stored
from tests.leases import content
from tests.waiting import eventually
from tests.weights_peers import TOKEN, free_place, slow_disk, token_file


@pytest.fixture
def place():
    return free_place()


@pytest.fixture
def tokens(tmp_path):
    return token_file(tmp_path)


@pytest.fixture
def source(manage, model, place, tokens):
    seeding = Seeding(listen=place, token_file=tokens, weights=True)
    made = manage(model, chunk_bytes=1 << 16, rank={"seeding": seeding})
    made.start()
    made.ready()
    return made


@pytest.fixture
def target(manage, model, place, tokens, tmp_path):
    seeding = Seeding(source=place, token_file=tokens, weights=True, within=5.0)
    python = slow_disk(tmp_path)
    return manage(model, chunk_bytes=1 << 16, rank={"seeding": seeding, "python": python})


def test_the_second_has_its_weights_from_the_first(source, target, model):
    target.start()
    target.ready()
    told = target.status()
    assert (told.counters["generation_bytes_read"], told.counters["bytes_read"]) == (0, 0)
    assert told.counters["generation_bytes_peer"] == told.arena_bytes
    assert "seeding" in target.phases
    assert told.generation != source.status().generation
    assert content(target.attach()) == stored(model)
    target.restart()
    assert target.status().adopted
    assert TOKEN not in target.log + source.log


def test_without_a_source_it_comes_from_the_disk(target, model):
    target.start()
    target.ready()
    told = target.status()
    assert told.counters["generation_bytes_peer"] == 0
    assert told.counters["bytes_read"] > 0
    assert "they are read from the disk" in target.log
    assert content(target.attach()) == stored(model)


def test_what_was_released_is_given_no_more(source, target):
    source.ask(m.Release())
    target.start()
    target.ready()
    assert "it has none" in target.log
    source.ask(m.Load())
    eventually(lambda: source.status().state is State.SERVING, lambda: "weights again")
    target.ask(m.Release())
    target.ask(m.Load())
    eventually(lambda: target.status().state is State.SERVING, lambda: "weights again")
    assert target.status().counters["generation_bytes_peer"] == target.status().arena_bytes


def test_a_source_that_is_killed_costs_nothing_but_time(source, target, model):
    source.kill()
    target.start()
    target.ready()
    assert content(target.attach()) == stored(model)
