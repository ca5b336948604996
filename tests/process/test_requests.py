"""What engines and operators may ask for: release, load, memory, watch, and what they are told."""

from __future__ import annotations

import contextlib
import dataclasses
import signal

import pytest

from preloadd.domain.leases import Mode
from preloadd.domain.lifecycle import State
from preloadd.errors import ErrorCode, Mismatch, Unavailable
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Client
from tests.checkpoints import SHARDS, llama, stored
from tests.descriptors import targets
from tests.leases import content
from tests.manager import Manager
from tests.waiting import eventually


def watch(manager: Manager, undo: contextlib.ExitStack) -> Client:
    client = undo.enter_context(manager.client())
    client.call(m.Watch(), timeout=10)
    return client


@pytest.fixture
def undo():
    with contextlib.ExitStack() as undo:
        yield undo


# -- release and load --


def test_released_weights_are_freed_everywhere_and_come_back_when_asked_for(manager, model, undo):
    first, arena = manager.generation, manager.arena
    watcher = watch(manager, undo)
    assert manager.ask(m.Release()) == m.Done()
    assert watcher.event(timeout=10) == m.StateChanged(state=State.RELEASED)
    told = manager.status()
    assert (told.state, told.generation, told.arena_bytes) == (State.RELEASED, "", 0)
    manager.until(lambda: set(manager.removed) == arena, "eviction")
    assert set(manager.parked) == {"listen", "released"}
    assert not [one for one in targets(manager.pid).values() if "memfd" in one]
    with pytest.raises(Unavailable, match="released; ask for a load") as refused:
        manager.attach()
    assert refused.value.reason == m.Reason.RELEASED

    assert manager.ask(m.Load()) == m.Done()
    assert watcher.event(timeout=10) == m.StateChanged(state=State.LOADING)
    served = watcher.event(timeout=10)
    assert served.state is State.SERVING
    assert served.generation not in {"", first}
    told = manager.status()
    assert (told.generation, told.counters["loads"], told.detail) == (served.generation, 2, "")
    lease = manager.attach()
    assert content(lease) == stored(model)
    lease.close()


def test_released_weights_stay_released_over_a_restart_until_a_load_is_asked_for(manager):
    assert manager.ask(m.Release()) == m.Done()
    manager.restart()
    told = manager.status()
    assert (told.state, told.counters["loads"]) == (State.RELEASED, 0)
    assert "ask for a load" in told.detail
    assert manager.ask(m.Load()) == m.Done()
    manager.until(lambda: len(manager.arena) > 1 and "released" not in manager.parked, "a load")
    eventually(lambda: manager.status().state is State.SERVING, lambda: "the load's end")
    manager.restart()
    assert manager.status().adopted


def test_nothing_is_released_while_other_engines_hold_it(manager):
    one, two = manager.attach(mode=Mode.COPY), manager.attach()
    refused = manager.ask(m.Release())
    assert refused.code == ErrorCode.DENIED
    assert "2 other engine(s) hold the weights: test (pid " in refused.detail
    one.release()
    assert manager.status().state is State.SERVING
    two.close()
    manager.until(lambda: len(manager.leases) == 1, "end of one lease")
    one.release()
    assert manager.status().state is State.RELEASED
    one.close()


def test_an_engine_that_maps_the_weights_does_not_release_them(manager):
    engine = manager.attach(mode=Mode.ZERO_COPY)
    engine.release()
    assert manager.status().state is State.SERVING
    with manager.client() as client:
        attach = m.Attach(key=manager.status().key, device="CPU-0")
        for fd in client.call(attach, timeout=10).fds:
            fd.close()
        refused = client.call(m.Release(), timeout=10).reply
    assert (refused.code, "only one that copied them" in refused.detail) == ("denied", True)
    engine.close()


def test_copy_mode_releases_what_it_copied(manager, model):
    lease = manager.attach(mode=Mode.COPY)
    assert manager.status().leases[0].mode is Mode.COPY
    copied = content(lease)
    lease.release()
    lease.close()
    assert copied == stored(model)
    told = manager.status()
    assert (told.state, told.lease_count) == (State.RELEASED, 0)


def test_engines_of_an_earlier_generation_neither_hinder_a_release_nor_may_they(manager, model):
    old = manager.attach()
    manager.kill()
    (model / SHARDS[0]).touch()
    manager.start()
    manager.ready()
    assert manager.status().lease_count == 1
    holder = manager.attach(mode=Mode.COPY)
    assert manager.ask(m.Release()).code == ErrorCode.DENIED
    holder.release()
    assert manager.status().state is State.RELEASED
    holder.close()
    old.close()


def test_releasing_and_loading_out_of_turn_is_refused(manager):
    refused = manager.ask(m.Load())
    assert (refused.code, refused.detail) == (
        ErrorCode.UNAVAILABLE,
        "nothing to load: the rank is serving",
    )
    manager.ask(m.Release())
    refused = manager.ask(m.Release())
    assert refused.detail == "nothing to release: the rank is released"


def test_a_load_that_fails_after_a_release_is_told_and_can_be_tried_again(manager, model, undo):
    watcher = watch(manager, undo)
    manager.ask(m.Release())
    moved = model.rename(model.with_name("moved"))
    manager.ask(m.Load())
    states = [watcher.event(timeout=10).state for _ in range(3)]
    assert states == [State.RELEASED, State.LOADING, State.FAILED]
    told = manager.status()
    assert f"{model}: no such folder" in told.detail
    with pytest.raises(Unavailable, match="no such folder") as refused:
        manager.attach(moved)
    assert refused.value.reason == m.Reason.FAILED
    manager.until(lambda: any("failed: " in t.get("STATUS", "") for t in manager.told), "STATUS")
    moved.rename(model)
    assert manager.ask(m.Load()) == m.Done()
    states = [watcher.event(timeout=10).state for _ in range(2)]
    assert states == [State.LOADING, State.SERVING]
    assert manager.status().detail == ""


# -- watch --


def test_a_watcher_is_told_of_the_end_and_finds_the_same_generation_after_a_restart(manager, undo):
    generation = manager.generation
    watcher = undo.enter_context(manager.client())
    first = watcher.call(m.Watch(), timeout=10).reply
    checkpoint = manager.status().key["checkpoint"]
    assert first == m.StateChanged(
        state=State.SERVING, generation=generation, checkpoint=checkpoint
    )
    assert watcher.event(timeout=0.05) is None
    manager.signal(signal.SIGTERM)
    assert watcher.event(timeout=10).state is State.STOPPING
    with pytest.raises(Unavailable, match="hung up"):
        watcher.event(timeout=10)
    assert manager.ended() == 0
    manager.start()
    again = undo.enter_context(manager.client())
    told = again.call(m.Watch(), timeout=10).reply
    while told.state is not State.SERVING:
        told = again.event(timeout=10)
    assert told.generation == generation


# -- memory and mismatches --


def test_memory_is_told_to_those_who_would_share_it(shared):
    told = shared.status()
    wanted = shared.wanted()
    request = m.Memory(key=wanted.key(""), device="CPU-0", files=wanted.files)
    assert shared.ask(request) == m.MemoryHeld(nbytes=told.arena_bytes)
    other = m.Memory(key={**told.key, "dtype": "float64"}, device="CPU-0")
    assert shared.ask(other) == m.Mismatched(
        fields=(m.Field(name="dtype", daemon="float16", engine="float64"),)
    )


def test_a_mismatch_names_every_field_with_both_values(shared):
    key = {**shared.status().key, "tp_size": "2", "tp_rank": "1", "novel": "x" * 2000}
    del key["revision"]
    mismatch = shared.ask(m.Attach(key=key, device="CPU-0"))
    assert [(f.name, f.daemon, f.engine) for f in mismatch.fields] == [
        ("novel", "(absent)", "x" * 512),
        ("revision", "", "(absent)"),
        ("tp_rank", "0", "1"),
        ("tp_size", "1", "2"),
    ]
    assert shared.status().lease_count == 0


def test_another_device_is_a_mismatch(shared):
    for request in (m.Attach, m.Memory):
        mismatch = shared.ask(request(key=shared.status().key, device="CPU-7"))
        assert mismatch.fields == (m.Field(name="device", daemon="CPU-0", engine="CPU-7"),)


def test_another_checkpoint_of_the_same_shape_is_a_mismatch_of_content(shared, tmp_path):
    other = llama(tmp_path / "other", seed=1)
    with pytest.raises(Mismatch, match="checkpoint: daemon has 'sampled-1:") as refused:
        shared.attach(other)
    ((name, theirs, ours),) = refused.value.fields
    assert (name, theirs) == ("checkpoint", shared.status().key["checkpoint"])
    assert ours.startswith("sampled-1:")
    assert ours != theirs


def test_a_copy_with_renamed_shards_matches_by_content(shared, tmp_path):
    copy = llama(tmp_path / "copy")
    for shard in SHARDS:
        (copy / shard).rename(copy / shard.replace("model", "weights"))
    index = copy / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"weights-'))
    lease = shared.attach(copy)
    assert content(lease) == stored(copy)
    lease.close()


def test_a_checkpoint_replaced_after_caching_is_never_answered_with_the_old_weights(manager, model):
    replacement = llama(model.with_name("replacement"), seed=3)
    for file in replacement.iterdir():
        file.rename(model / file.name)
    with pytest.raises(Mismatch, match="checkpoint: daemon has"):
        manager.attach()


def test_an_engine_of_another_split_is_refused_with_the_sizes(shared):
    settings = shared.settings
    placement = dataclasses.replace(
        settings.model.placement,
        parallel=dataclasses.replace(settings.model.placement.parallel, tensor=2),
        tensor_rank=1,
    )
    model = dataclasses.replace(settings.model, placement=placement)
    shared.settings = dataclasses.replace(settings, model=model)
    try:
        with pytest.raises(Mismatch, match="tp_size: daemon has '1', engine wants '2'"):
            shared.attach()
    finally:
        shared.settings = settings
