"""A rank that ended and comes back takes over what was parked; engines notice nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import shutil
import signal
from pathlib import Path

import pytest

from preloadd.domain.leases import Mode
from preloadd.domain.lifecycle import State
from preloadd.domain.placement import Parallel, Placement
from preloadd.errors import CheckpointError
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import sealed_bytes
from preloadd.memory.host import HostFiller
from preloadd.protocol import messages as m
from tests.checkpoints import SHARDS, llama, rewrite, save, sparse, stored, tensors
from tests.leases import content
from tests.manager import Manager


def assert_adopted(manager: Manager, generation: str, *phases: str) -> None:
    """This life serves `generation` and has read nothing for it; a load came no further."""
    told = manager.status()
    assert (told.state, told.adopted, told.generation) == (State.SERVING, True, generation)
    assert (told.counters["loads"], told.counters["bytes_read"]) == (0, 0)
    assert told.counters["generation_bytes_read"] > 0
    assert manager.phases == [*phases]


def assert_loaded(manager: Manager, model: Path) -> None:
    """This life has loaded `model` itself and serves it as it lies on disk now."""
    told = manager.status()
    assert (told.state, told.adopted, told.counters["loads"]) == (State.SERVING, False, 1)
    lease = manager.attach(model)
    assert content(lease) == stored(model)
    lease.close()


def hung_up(fd: int) -> bool:
    """Whether the other end of a connection is gone, or has said something."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(0))


# -- the engine's side of a restart --


def test_killed_and_restarted_twice_it_serves_the_same_and_engines_keep_their_leases(
    manager, model
):
    generation, files = manager.generation, stored(model)
    engine = manager.attach()
    for _ in range(2):
        manager.restart()
        assert_adopted(manager, generation)
        (lease,) = manager.status().leases
        assert (lease.client, lease.pid, lease.generation) == ("test", os.getpid(), generation)
        assert not hung_up(engine._client.fileno())
        assert content(engine) == files
    assert not manager.removed
    engine.close()
    manager.until(lambda: not manager.leases, "end of the lease")
    assert manager.status().lease_count == 0


def test_an_engine_may_release_over_a_connection_that_an_earlier_daemon_accepted(manager):
    generation = manager.generation
    engine = manager.attach(mode=Mode.COPY)
    manager.restart()
    engine.release()
    assert manager.status().state is State.RELEASED
    manager.until(lambda: set(manager.parked) == {"listen", "released"}, "empty store")
    engine.close()
    assert f"manifest.{generation}" in manager.removed


def test_an_engine_that_leaves_while_there_is_no_daemon_is_forgotten(manager):
    engine = manager.attach()
    stays = manager.attach()
    manager.kill()
    engine.close()
    manager.start()
    manager.ready()
    manager.until(lambda: len(manager.leases) == 1, "end of one lease")
    assert manager.status().lease_count == 1
    stays.close()


def test_a_kill_in_the_middle_of_adoption_loses_nothing(manager, model):
    generation, parked = manager.generation, set(manager.parked)
    engine = manager.attach()
    manager.kill()
    manager.start()
    manager.kill()
    manager.start()
    manager.until(lambda: any("STATUS" in told for told in manager.told), "adoption")
    manager.kill()
    manager.start()
    manager.ready()
    assert_adopted(manager, generation)
    assert set(manager.parked) - set(manager.leases) == parked
    assert manager.status().lease_count == 1
    assert content(engine) == stored(model)
    engine.close()


def test_nobody_meets_a_refused_connection_while_there_is_no_daemon(manager):
    manager.kill()
    with manager.client() as client:
        manager.start()
        told = client.call(m.Status(), timeout=10).reply
        assert isinstance(told, m.StatusTold)
    manager.ready()


@pytest.mark.parametrize(
    "gone", [["rank.sock"], ["rank.sock", "rank.lock", "."]], ids=["socket", "folder"]
)
def test_a_parked_listener_whose_path_is_gone_is_replaced(manager, gone):
    manager.kill()
    for name in gone:
        path = manager.socket.parent / name
        path.rmdir() if path.is_dir() else path.unlink()
    manager.start()
    manager.ready()
    assert manager.removed == ["listen"]
    assert manager.parked["listen"] == 1
    manager.restart()
    assert manager.removed == ["listen"]
    manager.attach().close()


# -- another checkpoint --


def in_place(model: Path) -> None:
    contents = stored(model)
    save(
        model / "new",
        {n: d for n, d in tensors(seed=1).items() if n in _names(model / SHARDS[1])},
    )
    new = (model / "new").read_bytes()
    (model / "new").unlink()
    assert len(new) == (model / SHARDS[1]).stat().st_size
    rewrite(model / SHARDS[1], new)
    assert stored(model) != contents


def touched(model: Path) -> None:
    os.utime(model / SHARDS[0], (1, 1))


def renamed_over(model: Path) -> None:
    other = llama(model.with_name("other"), seed=2)
    (other / SHARDS[2]).rename(model / SHARDS[2])


def config(model: Path) -> None:
    path = model / "config.json"
    rewrite(path, path.read_bytes().replace(b"10000.0", b"20000.0"))


def _names(shard: Path) -> set[str]:
    return {name for name in tensors() if name.encode() in shard.read_bytes()[:65536]}


@pytest.mark.parametrize("change", [in_place, touched, renamed_over, config])
def test_a_changed_checkpoint_is_loaded_afresh(manager, model, change):
    before, files = manager.arena, stored(model)
    engine = manager.attach()
    manager.kill()
    change(model)
    manager.start()
    manager.ready()
    assert set(manager.removed) == before
    assert not manager.arena & before
    assert "parked weights are for something else: files: was 1 changed or gone" in manager.log
    assert_loaded(manager, model)
    assert content(engine) == files
    engine.close()


def test_weights_stay_where_a_changed_checkpoint_cannot_be_loaded(manager, model):
    """It may be half-way through a download; the next start loads it."""
    generation = manager.generation
    whole = (model / SHARDS[1]).read_bytes()
    manager.kill()
    rewrite(model / SHARDS[1], whole[:-100])
    manager.start()
    manager.ready()
    assert_adopted(manager, generation, "opening")
    assert not manager.removed
    assert "the weights of before stay" in manager.log
    assert SHARDS[1] in manager.log
    with pytest.raises(CheckpointError, match=SHARDS[1]):
        manager.attach()
    rewrite(model / SHARDS[1], whole)
    manager.restart()
    assert_loaded(manager, model)
    assert manager.generation != generation


def with_three_heads(manager: Manager, model: Path) -> None:
    """A new configuration has come, its shards have not."""
    path = model / "config.json"
    rewrite(path, json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 3}).encode())


def without_room(manager: Manager, model: Path) -> None:
    """What is there now is far too large, with the weights of before gone as well."""
    shutil.rmtree(model)
    sparse(model, 2 << 40, tensors=128)


def without_python(manager: Manager, model: Path) -> None:
    touched(model)
    manager.settings = dataclasses.replace(manager.settings, python="/bin/false")


@pytest.mark.parametrize(
    ("change", "why", "phases"),
    [
        (with_three_heads, "3 attention heads", ["opening"]),
        (without_room, r"the weights need .* are missing", ["opening"]),
        (without_python, "ended with 1 before .* see whether /bin/false works", []),
    ],
)
def test_weights_stay_where_what_would_replace_them_cannot_be_loaded(
    manage, model, change, why, phases
):
    of_two = {"placement": Placement(Parallel(tensor=2), tensor_rank=1)}
    manager: Manager = manage(model, **(of_two if change is with_three_heads else {}))
    manager.start()
    manager.ready()
    generation = manager.generation
    manager.kill()
    change(manager, model)
    manager.start()
    manager.ready()
    assert_adopted(manager, generation, *phases)
    assert not manager.removed
    assert re.search(f"the weights of before stay until .*: .*{why}", manager.status().detail)


def test_weights_for_other_settings_stay_parked_where_those_cannot_be_loaded(manager, model):
    generation, before = manager.generation, manager.settings
    manager.kill()
    manager.settings = dataclasses.replace(
        before, python="/bin/false", model=dataclasses.replace(before.model, revision="v2")
    )
    manager.start()
    assert manager.ended() == 1
    assert "see whether /bin/false works" in manager.log
    assert not manager.removed
    manager.settings = before
    manager.start()
    manager.ready()
    assert_adopted(manager, generation)


def test_other_settings_are_loaded_afresh(manager, model):
    before = manager.arena
    manager.kill()
    manager.settings = dataclasses.replace(
        manager.settings, model=dataclasses.replace(manager.settings.model, revision="v2")
    )
    manager.start()
    manager.ready()
    assert set(manager.removed) == before
    assert "revision: was , now v2" in manager.log
    assert manager.status().counters["loads"] == 1


def test_a_renamed_checkpoint_is_adopted(manager, model):
    generation = manager.generation
    manager.kill()
    moved = model.rename(model.with_name("moved"))
    manager.settings = dataclasses.replace(
        manager.settings, model=dataclasses.replace(manager.settings.model, path=str(moved))
    )
    manager.start()
    manager.ready()
    assert_adopted(manager, generation)
    manager.attach(moved).close()


def test_weights_whose_checkpoint_is_gone_are_adopted_with_a_warning(manager, model):
    generation = manager.generation
    manager.kill()
    model.rename(model.with_name("moved"))
    manager.start()
    manager.ready()
    assert_adopted(manager, generation)
    (warning,) = [line for line in manager.log.splitlines() if "WARNING" in line]
    assert f"cannot be compared with what is parked: {model}: no such folder" in warning


def test_weights_for_other_settings_are_not_adopted_for_want_of_a_checkpoint(manager, model):
    manager.kill()
    model.rename(model.with_name("moved"))
    manager.settings = dataclasses.replace(
        manager.settings, model=dataclasses.replace(manager.settings.model, revision="v2")
    )
    manager.start()
    assert manager.ended() == 65
    assert "revision: was , now v2" in manager.log
    assert f"{model}: no such folder: correct the path" in manager.log
    assert not manager.removed


# -- what was parked is not what it should be --


def manifest_with_a_flipped_byte(manager: Manager) -> None:
    name = f"manifest.{manager.generation}"
    (sealed,) = manager.copies(name)
    with sealed:
        content = bytearray(os.pread(sealed.fileno(), 1 << 20, 0))
    content[-1] ^= 1
    replace(manager, name, sealed_bytes("manifest", content))


def manifest_missing(manager: Manager) -> None:
    replace(manager, f"manifest.{manager.generation}")


def chunk_missing(manager: Manager) -> None:
    replace(manager, f"chunk.{manager.generation}.1")


def chunk_of_another_size(manager: Manager) -> None:
    replace(manager, f"chunk.{manager.generation}.1", sealed_bytes("chunk", b"\0" * 4096))


def chunk_without_seals(manager: Manager) -> None:
    name = f"chunk.{manager.generation}.1"
    (sealed,) = manager.copies(name)
    with sealed:
        nbytes = os.fstat(sealed.fileno()).st_size
    with HostFiller().create(nbytes) as chunk:
        replace(manager, name, chunk.fd.duplicate())


def chunk_that_is_no_memfd(manager: Manager) -> None:
    replace(manager, f"chunk.{manager.generation}.0", OwnedFd(os.open("/dev/null", os.O_RDONLY)))


def replace(manager: Manager, name: str, fd: OwnedFd | None = None) -> None:
    manager.unpark(name)
    if fd is not None:
        manager.park(name, fd)


@pytest.mark.parametrize(
    "damage",
    [
        manifest_with_a_flipped_byte,
        manifest_missing,
        chunk_missing,
        chunk_of_another_size,
        chunk_without_seals,
        chunk_that_is_no_memfd,
    ],
)
def test_damaged_weights_are_dropped_whole_and_loaded_afresh(manager, model, damage):
    manager.kill()
    damage(manager)
    before = manager.arena
    manager.start()
    manager.ready()
    assert set(manager.removed) == before
    assert not manager.arena & before
    assert_loaded(manager, model)
    assert damage is manifest_missing or "parked weights are damaged: " in manager.log


FOREIGN = {
    "memfd under the listener's name": "listen",
    "memfd under a lease's name": f"lease.{'0b' * 8}.{'0a' * 16}.zero_copy.test",
    "orphan chunk": f"chunk.{'0c' * 16}.0",
    "unknown name": "stored",
}


@pytest.mark.parametrize("name", FOREIGN.values(), ids=FOREIGN)
def test_what_is_parked_beside_the_weights_is_dropped_alone(manager, name):
    generation = manager.generation
    manager.kill()
    parked = set(manager.parked) - {name}
    replace(manager, name, sealed_bytes("foreign", b"foreign"))
    manager.start()
    manager.ready()
    assert_adopted(manager, generation)
    assert manager.status().lease_count == 0
    manager.until(lambda: name in manager.removed, f"removal of {name}")
    assert set(manager.removed) == {name}
    assert set(manager.parked) == parked | {"listen"}
    manager.restart()
    assert manager.removed == [name]


@pytest.mark.parametrize("same", [True, False], ids=["of the same files", "of other files"])
def test_of_two_generations_one_is_kept(manager, model, same):
    first = {name: manager.copies(name)[0] for name in manager.arena}
    if not same:
        manager.kill()
        touched(model)
        manager.start()
        manager.ready()
    else:
        assert manager.ask(m.Release()) == m.Done()
        assert manager.ask(m.Load()) == m.Done()
        manager.until(
            lambda: len(manager.arena) == len(first) and not manager.arena & set(first),
            "another load",
        )
    second = manager.arena
    assert len(second) == len(first)
    manager.kill()
    manager.removed.clear()
    for name, fd in first.items():
        manager.park(name, fd)
    manager.start()
    manager.ready()
    kept = manager.arena
    assert kept in ([second] if not same else [second, set(first)])
    assert set(manager.removed) == (second | set(first)) - kept
    assert_adopted(manager, manager.generation)
    lease = manager.attach()
    assert content(lease) == stored(model)
    lease.close()


def test_a_rank_that_is_killed_while_it_replaces_weights_begins_anew(manager, model):
    before = manager.arena
    manager.kill()
    touched(model)
    manager.start()
    manager.until(lambda: set(manager.removed) == before, "eviction")
    manager.signal(signal.SIGKILL)
    manager.ended()
    manager.start()
    manager.ready()
    assert len(manager.arena) == len(before)
    assert_loaded(manager, model)
