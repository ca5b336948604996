"""What vLLM has made of a checkpoint on one host, a second one has from there."""

import pytest

from tests.weights_peers import free_place, slow_disk, token_file

pytestmark = pytest.mark.slow


def test_weights_of_a_peer_say_what_the_peers_say(zoo, daemon, vllm_python, lasting, tmp_path):
    model, place = zoo("llama"), free_place()
    where = ("--seed-token-file", token_file(tmp_path))
    listen = (
        "--seed-listen-host",
        place.host,
        "--seed-listen-port",
        str(place.port),
        "--seed-weights",
    )
    ask = ("--seed-source-host", place.host, "--seed-source-port", str(place.port))
    source = daemon(model, *where, *listen)
    source.serving("CPU-0")
    python = slow_disk(tmp_path, vllm_python, seconds=1.5)
    target = daemon(model, *where, *ask, "--seed-weights", "--python", python)
    (told,) = target.serving("CPU-0")
    assert told.counters["generation_bytes_peer"] == told.arena_bytes
    assert told.counters["generation_bytes_read"] == 0
    assert told.generation != source.status().generation
    said = []
    for one in (source, target):
        assert not lasting.attach(model, one.sockets).reason
        said.append(lasting.generate())
        lasting.drop()
    assert said[0] == said[1]
