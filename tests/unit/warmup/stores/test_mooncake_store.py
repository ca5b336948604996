"""The process that works for a store: every way in which it can go wrong, with a real one."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from preloadd.errors import ConfigError
from preloadd.warmup.stores.api import Store, StoreFault
from preloadd.warmup.stores.mooncake_config import read_config
from preloadd.warmup.stores.mooncake_store import MooncakeStore, open_mooncake

KEY = "vllm-warmup-cache/kind/hash/name.json"
DEADLINE_S = 1.5
PAUSE_S = 0.2
"""Before another try."""

AGAIN_S = 2 * PAUSE_S
_: type[Store] = MooncakeStore


@contextmanager
def store(pool, **more):
    settings = {"deadline": DEADLINE_S, "pause": PAUSE_S, **more}
    with MooncakeStore(read_config(pool.environ), pool.environ, **settings) as opened:
        yield opened


def children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def test_what_one_keeps_another_finds(pool):
    with store(pool) as one, store(pool) as other:
        assert other.find(KEY, 100) is None
        one.keep(KEY, b"\0value")
        assert other.find(KEY, 100) == b"\0value"
        other.keep(KEY, b"later")
        assert one.find(KEY, 100) == b"\0value"


def test_what_is_damaged_is_replaced(pool):
    with store(pool) as one, store(pool) as other:
        one.keep(KEY, b"damaged")
        other.replace(KEY, b"whole")
        assert one.find(KEY, 100) == b"whole"
        with pytest.raises(StoreFault, match="local_buffer_size is less"):
            other.replace(KEY, bytes((1 << 20) + 1))


def test_a_large_value(pool):
    pool.configure(local_buffer_size="16MB")
    value = os.urandom(9 << 20)
    with store(pool, deadline=10) as opened:
        opened.keep(KEY, value)
        assert opened.find(KEY, len(value)) == value


def test_how_it_is_set_up(pool):
    pool.configure(tenant_id="t", device_name="d", local_buffer_size="9GB")
    pool.environ["MC_RPC_TIMEOUT_MS"] = "77"
    with store(pool) as opened:
        opened.find(KEY, 1)
    *told, environ = json.loads((pool.folder / "setup.json").read_text())
    assert told[:4] == ["127.0.0.1", "P2PHANDSHAKE", 0, 512 << 20]
    assert told[4:] == ["tcp", "d", pool.master, {"tenant_id": "t"}]
    assert environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"
    assert environ["MC_RPC_TIMEOUT_MS"] == "77"


def test_its_own_name_may_be_told(pool):
    pool.environ["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] = "node-1"
    with store(pool) as opened:
        opened.find(KEY, 1)
    assert json.loads((pool.folder / "setup.json").read_text())[0] == "node-1"


def test_too_long_values_are_refused_and_nothing_else_is(pool):
    with store(pool) as opened:
        with pytest.raises(StoreFault, match=r"1,048,577 bytes, and local_buffer_size is less"):
            opened.keep(KEY, bytes((1 << 20) + 1))
        opened.keep(KEY, b"123")
        with pytest.raises(StoreFault, match="3 bytes, and 2 are the most"):
            opened.find(KEY, 2)
        assert opened.find(KEY, 3) == b"123"


@pytest.mark.parametrize("call", ["get_size", "get_buffer", "is_exist", "put"])
def test_a_crash_costs_one_call(pool, call):
    with store(pool) as opened:
        opened.keep(KEY, b"x")
        pool.script(**{call: "crash"})
        with pytest.raises(StoreFault, match="was killed by signal 11"):
            opened.find(KEY, 9) if call.startswith("get") else opened.keep(f"{KEY}2", b"y")
        pool.script()
        time.sleep(AGAIN_S)
        assert opened.find(KEY, 9) == b"x"


@pytest.mark.parametrize("how", ["hang", "hold"])
@pytest.mark.parametrize("call", ["setup", "get_size"])
def test_what_hangs_is_ended_and_left_alone_for_a_while(pool, how, call):
    before = children()
    with store(pool, deadline=1.0, pause=0.8) as opened:
        pool.script(**{call: how})
        begun = time.monotonic()
        with pytest.raises(StoreFault, match=rf"no answer within 1 s.*{pool.master}"):
            opened.find(KEY, 9)
        assert time.monotonic() - begun < 1.0 + 0.5
        assert children() == before
        begun = time.monotonic()
        with pytest.raises(StoreFault, match="no answer"):
            opened.find(KEY, 9)
        assert time.monotonic() - begun < 0.05
        pool.script()
        time.sleep(0.9)
        assert opened.find(KEY, 9) is None


def test_it_is_tried_less_and_less_often(pool):
    pool.script(get_size=-900)
    with store(pool, pause=0.1) as opened:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            with pytest.raises(StoreFault, match=r"the master cannot be reached \(-900\)"):
                opened.find(KEY, 9)
            time.sleep(0.01)
    # At 0, 0.1, 0.3 and 0.7 s.
    assert pool.calls.count("get_size") == 4
    assert pool.calls.count("setup") == 1


def test_one_that_ends_between_calls_is_replaced_without_a_word(pool):
    before = children()
    with store(pool) as opened:
        opened.keep(KEY, b"x")
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        assert opened.find(KEY, 9) == b"x"


@pytest.mark.slow
def test_a_value_left_half_written_is_replaced(pool):
    with store(pool, deadline=4) as opened:
        pool.script(is_exist=0)
        opened.keep(KEY, b"whole")
        assert "upsert" in pool.calls
        assert opened.find(KEY, 9) == b"whole"


@pytest.mark.slow
def test_a_full_pool_is_no_reason_to_stop_asking(pool):
    with store(pool, deadline=4) as opened:
        pool.script(put=-200)
        with pytest.raises(StoreFault, match="no room"):
            opened.keep(KEY, b"x")
        assert pool.calls.count("put") > 10
        assert opened.find(KEY, 9) is None


def test_what_cannot_be_transferred(pool):
    with store(pool) as opened:
        opened.keep(KEY, b"x")
        pool.script(get_buffer=-1)
        with pytest.raises(StoreFault, match="cannot be transferred"):
            opened.find(KEY, 9)


def test_what_the_library_raises_is_told_on_one_line(pool):
    with store(pool) as opened:
        pool.script(get_size="raise")
        with pytest.raises(StoreFault, match=r"RuntimeError: something\\nof C\+\+"):
            opened.find(KEY, 9)


def test_joining_again_after_it_failed(pool):
    with store(pool) as opened:
        pool.script(setup=-1)
        with pytest.raises(StoreFault, match="cannot be joined: internal error"):
            opened.find(KEY, 9)
        pool.script()
        time.sleep(AGAIN_S)
        assert opened.find(KEY, 9) is None


def test_no_master(pool):
    pool.configure(master_server_address="127.0.0.1:1")
    with (
        store(pool) as opened,
        pytest.raises(StoreFault, match=r"no master listens at 127\.0\.0\.1:1"),
    ):
        opened.find(KEY, 9)


def test_it_leaves_the_pool_when_it_is_not_asked_and_joins_again(pool):
    with store(pool, idle=0.1) as opened:
        opened.keep(KEY, b"x")
        time.sleep(0.5)
        assert pool.calls.count("close") == 1
        assert opened.find(KEY, 9) == b"x"
        assert pool.calls.count("setup") == 2


def test_what_lends_memory_stays_and_leaves_at_the_end(pool):
    pool.configure(mode="embedded", global_segment_size="1MB")
    with store(pool, idle=0.1) as opened:
        opened.keep(KEY, b"x")
        time.sleep(0.3)
        assert "close" not in pool.calls
    assert pool.calls[-1] == "close"


def test_a_close_that_hangs_is_not_waited_for(pool):
    pool.configure(mode="embedded", global_segment_size="1MB")
    with store(pool) as opened:
        opened.keep(KEY, b"x")
        pool.script(close="hold")
        begun = time.monotonic()
    assert time.monotonic() - begun < 4


def test_a_python_without_the_library(pool):
    pool.script(**{"import": "libibverbs.so.1: cannot open"})
    with pytest.raises(ConfigError) as told:
        open_mooncake("", pool.environ)
    assert f"{sys.executable} cannot load Mooncake (libibverbs.so.1" in str(told.value)
    assert "install" in str(told.value)


def test_no_python(pool, tmp_path):
    with pytest.raises(ConfigError, match="/none cannot be started: name another Python"):
        open_mooncake("", pool.environ, python=str(tmp_path / "none"))


def test_a_library_that_is_slow_to_load_is_no_fault(pool):
    pool.script(**{"import": "hang"})
    with store(pool, deadline=0.5) as opened:
        with pytest.raises(StoreFault, match="no answer within"):
            opened.find(KEY, 9)


def test_nothing_may_stand_behind_its_name(pool):
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH"):
        open_mooncake("x", pool.environ)


def gone(pid: int) -> bool:
    until = time.monotonic() + 2
    while time.monotonic() < until:
        # A zombie has ended, whoever is to reap it.
        with suppress(FileNotFoundError):
            if "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.01)
                continue
        return True
    return False


PARENT = """
import os, sys, time
from preloadd.warmup.stores.mooncake_config import read_config
from preloadd.warmup.stores.mooncake_store import MooncakeStore
store = MooncakeStore(read_config(os.environ), os.environ, deadline=30)
print(open(f"/proc/self/task/{os.getpid()}/children").read().split()[0], flush=True)
if sys.argv[1] == "asks":
    store.find("key", 9)
time.sleep(30)
"""


@pytest.mark.parametrize(("asks", "how"), [("idle", None), ("asks", "hang"), ("asks", "hold")])
def test_it_ends_with_who_started_it_whatever_it_does(pool, asks, how):
    pool.script(get_size=how)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, asks], env=pool.environ, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        until = time.monotonic() + 10
        while how and "get_size" not in pool.calls and time.monotonic() < until:
            time.sleep(0.01)
        parent.kill()
    assert gone(pid)
