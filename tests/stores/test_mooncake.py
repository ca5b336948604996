"""A shared store of real Mooncake, whose servers are killed, hung and filled up.

Whatever happens to them, no call takes longer than its deadline, this process never ends of it, and
the store is of use again once they are.
"""

import os
import time

import pytest

from preloadd.warmup.stores.mooncake_config import read_config
from preloadd.warmup.stores.mooncake_store import MooncakeStore
from preloadd.warmup.stores.opening import open_stores
from tests.stores.servers import listening

KEY = "vllm-warmup-cache/flashinfer_autotune/hash/autotune_configs_dp0_rank0.json"
MB = 1 << 20

DEADLINE_S = 5.0
SLACK_S = 0.5
"""For a machine that has other things to do."""

RECOVERED_S = 20.0


class Timed:
    """Stores, each of whose calls is to be over in time."""

    def __init__(self, stores):
        self.stores = stores
        self.longest = 0.0

    def find(self, key=KEY):
        return self._timed(self.stores.find, key)

    def keep(self, key=KEY, value=b"v"):
        self._timed(self.stores.keep, key, value)
        return not self.faults

    @property
    def faults(self):
        return " ".join(self.stores.faults)

    def _timed(self, call, *arguments):
        begun = time.monotonic()
        result = call(*arguments)
        took = time.monotonic() - begun
        assert took < DEADLINE_S + SLACK_S
        self.longest = max(self.longest, took)
        return result

    def recovers(self):
        """Wait until something can be kept and found."""
        until = time.monotonic() + RECOVERED_S
        for number in range(1000):
            key = f"recovered/{number}"
            if self.keep(key, b"again") and self.find(key) == b"again":
                return
            assert time.monotonic() < until, self.faults
            time.sleep(0.25)


@pytest.fixture
def store(opened):
    """A function: the store, timed."""
    return lambda servers: Timed(opened(servers))


def test_cold_start_without_who_published_it(mooncake, store):
    servers, large = mooncake(), os.urandom(20 * MB)
    with open_stores(["mooncake"], servers.environ) as first:
        first.keep(KEY, b'{"a": 1}')
        first.keep("large/bundle.tar", large)
        assert first.faults == ()
    second = store(servers)
    assert second.find() == b'{"a": 1}'
    assert second.find("large/bundle.tar") == large
    assert second.find("nowhere") is None
    assert second.faults == ""


def test_the_first_writer_wins(mooncake, store):
    servers = mooncake()
    first, second = store(servers), store(servers)
    assert first.keep(value=b"first")
    assert second.keep(value=b"second")
    assert first.find() == second.find() == b"first"


def test_what_is_damaged_is_replaced(mooncake, store):
    servers = mooncake()
    writer, reader = store(servers), store(servers)
    assert writer.keep(value=b"dam")
    assert reader.find() == b"dam"
    writer.stores.keep(KEY, b"whole", lambda value: value == b"whole")
    assert writer.faults == ""
    assert writer.find() == reader.find() == b"whole"


def test_memory_of_daemons_as_the_pool(mooncake, store):
    servers = mooncake()
    servers.pool.kill()
    servers.configure(mode="embedded", global_segment_size="64MB")
    first, second = store(servers), store(servers)
    first.recovers()
    assert second.find("recovered/0") in (b"again", None)
    second.recovers()


def test_nothing_listens_any_more_once_nothing_is_asked(mooncake):
    servers = mooncake()
    environ, before = servers.environ, listening()
    with MooncakeStore(read_config(environ), environ, idle=0.5) as store:
        store.keep(KEY, b"v")
        assert listening() > before
        until = time.monotonic() + 5
        while listening() != before:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert store.find(KEY, 9) == b"v"


def test_master_killed_and_restarted(mooncake, store):
    servers = mooncake()
    stores = store(servers)
    assert stores.keep()
    servers.master.kill()
    for _ in range(3):
        assert stores.find() is None
        assert stores.faults.startswith("mooncake: ")
    begun = time.monotonic()
    assert stores.find() is None
    assert not stores.keep()
    assert time.monotonic() - begun < DEADLINE_S
    servers.master.restart()
    stores.recovers()
    assert stores.find() is None


def test_master_that_hangs(mooncake, store):
    servers = mooncake()
    stores = store(servers)
    assert stores.keep()
    servers.master.stop()
    assert stores.find() is None
    assert "master" in stores.faults
    begun = time.monotonic()
    for _ in range(50):
        stores.find()
    assert time.monotonic() - begun < DEADLINE_S
    servers.master.go_on()
    stores.recovers()
    assert stores.find() == b"v"


def test_start_while_the_master_hangs(mooncake, store):
    servers = mooncake()
    servers.master.stop()
    stores = store(servers)
    assert stores.find() is None
    assert "cannot be joined" in stores.faults
    servers.master.go_on()
    stores.recovers()


def test_start_without_a_master(mooncake, store):
    servers = mooncake()
    servers.master.kill()
    stores = store(servers)
    assert stores.find() is None
    assert f"no master listens at {servers.address}" in stores.faults
    assert stores.longest < 1
    servers.master.restart()
    stores.recovers()


def test_pool_that_is_full(mooncake, store):
    stores = store(mooncake("64MB", default_kv_lease_ttl=1000))
    kept = [stores.keep(f"full/{number}", os.urandom(8 * MB)) for number in range(12)]
    assert kept[0]
    time.sleep(1.2)  # what is leased is not evicted
    stores.recovers()


def test_lease_that_expires_before_the_value_is_there(mooncake, store):
    value = os.urandom(40 * MB)
    stores = store(mooncake(default_kv_lease_ttl=5))
    stores.keep("large", value)
    for _ in range(3):
        assert stores.find("large") in (None, value)
    assert stores.keep("small", b"v")
    assert stores.find("small") == b"v"


def test_put_that_was_left_half_done(mooncake, store):
    servers = mooncake()
    writer = store(servers)
    assert writer.keep("before")
    servers.pool.stop()
    assert not writer.keep(value=os.urandom(8 * MB))
    servers.pool.go_on()
    other = store(servers)
    assert other.keep(value=b"whole"), other.faults
    assert other.find() == b"whole"


def test_pool_killed_and_restarted(mooncake, store):
    servers = mooncake()
    stores = store(servers)
    assert stores.keep()
    servers.pool.kill()
    assert stores.find() is None
    servers.pool.restart()
    stores.recovers()


def test_pool_that_hangs(mooncake, store):
    servers = mooncake()
    stores = store(servers)
    assert stores.keep(value=os.urandom(8 * MB))
    servers.pool.stop()
    assert stores.find() is None
    assert stores.faults
    servers.pool.go_on()
    stores.recovers()
