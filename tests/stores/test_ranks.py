"""Real ranks over a real Mooncake, whose servers are killed and hung: only what tunes stands in."""

import signal
import sys
import time

import pytest

from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Warmup
from preloadd.warmup.names import OVERRIDE
from tests.checkout import ROOT
from tests.checkpoints import llama
from tests.manager import managing
from tests.waiting import eventually

DEADLINE_S = 5.0
SLACK_S = 1.0
STORES = ("mooncake",)
TROUBLES = {
    "master hangs": lambda servers: servers.master.stop(),
    "master killed": lambda servers: servers.master.kill(),
    "pool hangs": lambda servers: servers.pool.stop(),
    "pool killed": lambda servers: servers.pool.kill(),
}


@pytest.fixture
def python(tmp_path):
    """The interpreter of ranks' children: real, but for loaders, which run that of the tests."""
    path = tmp_path / "python"
    path.write_text(
        f"""#!/bin/sh
export PYTHONPATH={ROOT}
[ "$2" = preloadd.loader ] && exec {sys.executable} -m tests.tuning_loader
exec {sys.executable} "$@"
"""
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def started(tmp_path, python):
    """`started(environ, tuner, root, stores)`: a rank that serves, and the seconds that it took."""
    model = llama(tmp_path / "model")
    with managing() as manage:

        def start(environ, tuner, root, stores=STORES):
            settings = {"warmup": Warmup(autotune=True, stores=stores), "python": python}
            manager = manage(model, rank=settings)
            name = "MOONCAKE_CONFIG_PATH"
            told = {"TUNER": tuner, OVERRIDE: str(tmp_path / root), name: environ[name]}
            manager.environ |= told
            began = time.monotonic()
            manager.start()
            manager.ready()
            return manager, time.monotonic() - began

        yield start


def test_a_cold_start_has_its_tables_from_one_that_is_gone(mooncake, started):
    environ = mooncake().environ
    source, _ = started(environ, "stand-in", "first")
    eventually(
        lambda: "tables: published to the shared stores" in source.status().warmup,
        lambda: str(source.status().warmup),
    )
    source.signal(signal.SIGTERM)
    assert source.ended() == 0
    other, _ = started(environ, "fails", "second")
    (line,) = other.status().warmup
    assert line.startswith("tables: installed from a shared store, ")


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_store_in_trouble_delays_a_start_by_its_deadline_at_most(mooncake, started, trouble):
    servers = mooncake()
    _, plain_s = started(servers.environ, "stand-in", "plain", stores=())
    TROUBLES[trouble](servers)
    rank, took_s = started(servers.environ, "stand-in", "tables")
    assert took_s < plain_s + DEADLINE_S + SLACK_S
    status = rank.status()
    assert status.state is State.SERVING
    assert status.warmup[0].startswith("tables: tuned ")
    eventually(
        lambda: any("mooncake" in line for line in rank.status().warmup),
        lambda: str(rank.status().warmup),
    )
    rank.signal(signal.SIGTERM)
    assert rank.ended() == 0
