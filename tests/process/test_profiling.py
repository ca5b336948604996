"""Engines that measure how much memory is free: nothing is freed meanwhile, over restarts too."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Deadlines
from preloadd.engine.client import Attachment
from preloadd.protocol import messages as m
from tests.checkpoints import SHARDS, stored
from tests.leases import content
from tests.manager import Manage, Manager
from tests.waiting import eventually


def profiling(manager: Manager) -> Attachment:
    """An engine that profiles, which the manager knows as well."""
    engine = manager.attach()
    engine.profiling(active=True)
    manager.until(lambda: any(n.startswith("profiling.") for n in manager.parked), "mark")
    assert manager.status().leases[0].profiling
    return engine


def changed(manager: Manager, model: Path) -> set[str]:
    """The next life finds another checkpoint than was parked; what was parked of it."""
    arena = manager.arena
    manager.kill()
    (model / SHARDS[0]).touch()
    manager.start()
    return arena


def waiting(manager: Manager) -> bool:
    return any("engines that measure" in fields.get("STATUS", "") for fields in manager.told)


def test_a_changed_checkpoint_is_not_loaded_before_profiling_ends(manager, model):
    engine, files = profiling(manager), stored(model)
    arena = changed(manager, model)
    manager.until(lambda: waiting(manager), "pause")
    # More time was asked for, which the next load would take in any case.
    assert any("EXTEND_TIMEOUT_USEC" in fields for fields in manager.told)
    time.sleep(0.2)
    assert (manager.removed, manager.phases) == ([], [])
    assert arena <= set(manager.parked)
    told = manager.status()
    assert (told.state, [lease.profiling for lease in told.leases]) == (State.STARTING, [True])
    engine.profiling(active=False)
    manager.ready()
    assert arena <= set(manager.removed)
    assert manager.status().counters["loads"] == 1
    assert content(engine) == files
    assert not [name for name in manager.parked if name.startswith("profiling.")]


def test_an_engine_that_ends_profiles_no_more(manager, model):
    engine = profiling(manager)
    changed(manager, model)
    manager.until(lambda: waiting(manager), "pause")
    engine.close()
    manager.ready()
    assert manager.status().lease_count == 0


def test_what_an_engine_says_is_not_believed_for_ever(manage: Manage, model):
    manager = manage(model, rank={"deadlines": Deadlines(profiling=0.5)})
    manager.start()
    manager.ready()
    engine = profiling(manager)
    changed(manager, model)
    manager.ready()
    assert manager.status().counters["loads"] == 1
    engine.close()


def test_weights_are_adopted_while_engines_profile(manager):
    engine, generation = profiling(manager), manager.generation
    manager.restart()
    told = manager.status()
    assert (told.adopted, told.generation, told.leases[0].profiling) == (True, generation, True)
    assert not waiting(manager)
    engine.close()


@pytest.mark.parametrize("request_", [m.Release(), m.Load()], ids=["release", "load"])
def test_who_asks_for_what_frees_memory_waits_and_nobody_else_does(manager, model, request_):
    """The engine that profiles holds weights of an earlier generation, or others could not ask."""
    engine = manager.attach()
    changed(manager, model)
    manager.ready()
    if isinstance(request_, m.Load):
        assert manager.ask(m.Release()) == m.Done()
    before = manager.status().state
    engine.profiling(active=True)
    answers: list[m.Reply] = []
    asker = threading.Thread(target=lambda: answers.append(manager.ask(request_)))
    asker.start()
    eventually(lambda: "measures free memory" in manager.log, lambda: "a pause")
    for _ in range(20):
        assert manager.status().state is before
    assert answers == []
    engine.profiling(active=False)
    asker.join(20)
    assert answers == [m.Done()]
    if isinstance(request_, m.Load):
        eventually(lambda: manager.status().state is State.SERVING, lambda: "the load's end")
    else:
        assert manager.status().state is State.RELEASED
    engine.close()
