"""Clients of a rank that is busy: it loads again, or its manager does not listen."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Digest
from preloadd.engine.client import Attachment, attach
from preloadd.engine.options import Options
from preloadd.errors import Unavailable
from preloadd.linux.notify import SEND_S
from preloadd.memory.host import HostMapper
from preloadd.protocol import messages as m
from tests.checkpoints import SHARDS, stored
from tests.leases import content
from tests.manager import Manage, Manager
from tests.waiting import eventually


@pytest.fixture
def loading(manage: Manage, model: Path):
    """A rank with a parked listener that loads again and does not get on; its engine with it."""
    manager: Manager = manage(model, digest=Digest.FULL)
    manager.start()
    manager.ready()
    engine = manager.attach()
    manager.kill()
    (model / SHARDS[0]).touch()
    with manager.stuck_loads():
        manager.start()
        manager.until_phase("identifying")
        yield manager, engine
    engine.close()


def test_who_comes_while_a_restarted_rank_loads_is_told_so_at_once(loading):
    manager, _ = loading
    since = time.monotonic()
    with pytest.raises(Unavailable, match=r"still loading: \S+ [\d.]+ \w+") as refused:
        manager.attach()
    assert time.monotonic() - since < 1
    assert refused.value.reason == m.Reason.LOADING
    told = manager.status()
    assert (told.state, told.adopted, told.counters["loads"]) == (State.LOADING, False, 0)
    assert told.phase == "identifying"
    assert 0 == told.done < told.total
    assert "READY" not in {key for fields in manager.told for key in fields}


def test_an_operator_who_releases_while_the_rank_loads_again_is_told_that_it_does(manage, model):
    manager: Manager = manage(model, digest=Digest.FULL)
    manager.start()
    manager.ready()
    assert manager.ctl("release", "tests").returncode == 0
    (model / SHARDS[0]).touch()
    with manager.stuck_loads():
        manager.ask(m.Load())
        eventually(lambda: manager.status().total, manager.account)
        ran = manager.ctl("release", "tests")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "nothing was released: wait until these serve" in ran.stderr
    assert re.search(r"tests CPU-0: loading: identifying [\d.]+ \w+", ran.stderr), ran
    eventually(lambda: manager.status().state is State.SERVING, manager.account)
    assert manager.ctl("release", "tests").returncode == 0


def test_an_engine_that_is_attached_while_the_rank_loads_keeps_its_lease(loading, model):
    manager, engine = loading
    (lease,) = manager.status().leases
    assert (lease.pid, lease.generation) == (os.getpid(), engine.manifest.generation)
    assert engine._client.call(m.Status(), timeout=5).reply.state is State.LOADING
    assert content(engine) == stored(model)


def test_a_rank_shows_that_it_lives_while_it_loads_and_while_it_serves(manage, model):
    manager: Manager = manage(model, digest=Digest.FULL)
    manager.environ["WATCHDOG_USEC"] = "100000"
    with manager.stuck_loads():
        manager.start()
        manager.until_phase("identifying")
        signs = signs_of_life(manager)
        manager.until(lambda: signs_of_life(manager) > signs + 2, "signs of life")
    manager.ready()
    signs = signs_of_life(manager)
    manager.until(lambda: signs_of_life(manager) > signs + 2, "signs of life")


def signs_of_life(manager: Manager) -> int:
    return sum("WATCHDOG" in fields for fields in manager.told)


def waiting(manager: Manager, *, state_timeout_s: float) -> Attachment:
    """Attach as an engine does that has been told not to load from disk."""
    options = Options(socket_path=manager.socket, fallback=False, state_timeout_s=state_timeout_s)
    return attach(manager.wanted(), options, HostMapper(), environ={}, uid=os.geteuid())


def test_an_engine_without_fallback_waits_for_the_load_only_so_long(loading):
    manager, _ = loading
    since = time.monotonic()
    with pytest.raises(Unavailable, match="still loading"):
        waiting(manager, state_timeout_s=0.7)
    assert 0.7 <= time.monotonic() - since < 5


def test_an_engine_without_fallback_gets_the_weights_once_they_are_loaded(manage, model):
    """First nobody is there, then a daemon that loads, then one that serves."""
    manager: Manager = manage(model, digest=Digest.FULL)
    with ThreadPoolExecutor(1) as engine:
        with manager.stuck_loads():
            lease = engine.submit(waiting, manager, state_timeout_s=20)
            manager.start()
            manager.until_phase("identifying")
            assert not lease.done()
        with_weights = lease.result(20)
    assert content(with_weights) == stored(model)
    with_weights.close()


def test_an_engine_without_fallback_does_not_wait_where_waiting_is_in_vain(manager):
    manager.ask(m.Release())
    since = time.monotonic()
    with pytest.raises(Unavailable, match="released"):
        waiting(manager, state_timeout_s=20)
    assert time.monotonic() - since < 5


# -- a manager that does not read --


def test_a_manager_that_hangs_keeps_no_client_from_being_served(manager, model):
    files = stored(model)
    with manager.hanging():
        since = time.monotonic()
        leases = [manager.attach(parked=False) for _ in range(30)]
        assert manager.status().lease_count == 30
        assert time.monotonic() - since < 5
        for lease in leases[10:]:
            lease.close()
        assert content(leases[0]) == files
    manager.until(lambda: len(manager.leases) == 10, "ten parked leases")
    manager.restart()
    assert manager.status().lease_count == 10
    for lease in leases[:10]:
        lease.close()


def test_a_manager_that_hangs_keeps_no_rank_from_ending(manager):
    with manager.hanging():
        leases = [manager.attach(parked=False) for _ in range(30)]
        manager.signal(signal.SIGTERM)
        assert manager.child.wait(SEND_S / 2) == 0
    assert manager.arena
    for lease in leases:
        lease.close()


def test_a_manager_that_hangs_during_a_load_is_waited_for(manage, model):
    manager: Manager = manage(model, chunk_bytes=1 << 14)
    with manager.hanging():
        manager.start()
        eventually(manager.loaders, lambda: "a loader")
        eventually(lambda: not manager.loaders(), lambda: "the loader's end")
        assert manager.child.poll() is None
        assert not manager.parked
    manager.ready()
    assert manager.status().chunks == len(manager.arena) - 1 > 10


def test_a_release_is_done_when_the_manager_has_let_go_too(manager):
    with ThreadPoolExecutor(1) as operator:
        with manager.hanging():
            released = operator.submit(manager.ask, m.Release())
            eventually(lambda: manager.status().state is State.RELEASED, lambda: "the release")
            with pytest.raises(Unavailable, match="released"):
                manager.attach()
            assert not released.done()
        assert released.result(20) == m.Done()
    assert not manager.arena
