"""What vLLM has made of a checkpoint on one host, a second one has from there."""

import os
import socket
from contextlib import closing

import pytest

from preloadd.domain.endpoint import Endpoint

pytestmark = pytest.mark.slow

SLOW = """
import os, time, runpy
read = os.preadv
def slowly(fd, buffers, *more):
    # A disk that takes its time for what is measured of it, and for nothing else.
    if sum(map(len, buffers)) > 1 << 16:
        time.sleep(1.5)
    return read(fd, buffers, *more)
os.preadv = slowly
runpy.run_module("preloadd.loader", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def slow_disk(vllm_python, tmp_path):
    """An interpreter with vLLM whose loaders have one."""
    (tmp_path / "slow.py").write_text(SLOW)
    path = tmp_path / "python"
    path.write_text(
        f"""#!/bin/sh
if [ "$1 $2" = "-m preloadd.loader" ] && [ $# = 2 ]; then
    exec {vllm_python} {tmp_path / "slow.py"}
fi
exec {vllm_python} "$@"
"""
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def place():
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return Endpoint("127.0.0.1", sock.getsockname()[1])


def test_weights_of_a_peer_say_what_the_peers_say(zoo, daemon, slow_disk, place, lasting, tmp_path):
    model = zoo("llama")
    token = tmp_path / "token"
    token.write_text("plt_" + "a-token" * 6)
    token.chmod(0o600)
    where = ("--seed-token-file", os.fspath(token))
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
    target = daemon(model, *where, *ask, "--seed-weights", "--python", os.fspath(slow_disk))
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
