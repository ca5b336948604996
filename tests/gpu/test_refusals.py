"""What an engine or a daemon is given that is no memory of this GPU, or is another's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu.child import Child, Raised
from preloadd.errors import DamagedManifest
from preloadd.linux.fds import OwnedFd
from preloadd.memory.cuda.keeper import DeviceKeeper
from preloadd.protocol import messages as m
from tests.gpu import device
from tests.gpu.inside import engine as inside
from tests.gpu.inside import memory
from tests.gpu.models import marked
from tests.manager import Manage, Manager

ELSEWHERE = "GPU-00000000-0000-0000-0000-000000000000"


def test_what_is_no_chunk_is_not_mapped(
    shared: Manager, rank_on: Manage, engine: Child, tmp_path: Path
) -> None:
    larger = rank_on(marked(tmp_path / "model", 64 << 20, 4))
    engine(inside.make_context)
    before = device.used()
    told = engine(memory.misuse, str(shared.socket), str(larger.socket))
    assert told.pop("good") == ["mapped", ""]
    assert {name: code for name, (code, _) in told.items()} == dict.fromkeys(told, "damaged")
    assert all(text for _, text in told.values())
    assert device.back_at(before)


def test_a_keeper_takes_chunks_alone(shared: Manager) -> None:
    keeper = DeviceKeeper()
    (name,) = [name for name in shared.arena if name.startswith("chunk.")]
    (chunk,) = shared.copies(name)
    with chunk, OwnedFd(os.memfd_create("weights")) as other:
        keeper.verify(chunk.fileno(), shared.status().arena_bytes)
        keeper.seal(chunk.fileno(), shared.status().arena_bytes)
        with pytest.raises(DamagedManifest):
            keeper.verify(other.fileno(), shared.status().arena_bytes)
    with OwnedFd(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)) as null:
        with pytest.raises(DamagedManifest):
            keeper.verify(null.fileno(), shared.status().arena_bytes)


def test_a_daemon_that_gets_back_something_else_loads_anew(
    rank_on: Manage, engine: Child, model: Path
) -> None:
    rank = rank_on(model)
    before = rank.generation
    rank.kill()
    (name,) = [name for name in rank.arena if name.startswith("chunk.")]
    rank.unpark(name)
    rank.park(name, OwnedFd(os.memfd_create("weights")))
    rank.start()
    rank.ready()
    assert rank.generation != before
    assert "damaged" in rank.log
    number = engine(inside.attach, str(model), socket_path=str(rank.socket))
    assert engine(inside.unlike, number, str(model)) == []


def test_an_engine_of_another_gpu_is_refused(shared: Manager, gpu: str) -> None:
    key = shared.status().key
    reply = shared.ask(m.Attach(key=key, device=ELSEWHERE, client="test"))
    assert isinstance(reply, m.Mismatched)
    assert [(each.name, each.daemon, each.engine) for each in reply.fields] == [
        ("device", gpu, ELSEWHERE)
    ]


def test_an_engine_that_uses_host_memory_is_refused(shared: Manager, engine: Child) -> None:
    options = {"memory": "host", "socket_path": str(shared.socket)}
    with pytest.raises(Raised) as told:
        engine(inside.attach, shared.settings.model.path, **options)
    assert told.value.code in ("mismatch", "denied", "unavailable")
    assert "CPU-0" in told.value.text


def test_an_engine_without_a_visible_gpu_is_told_what_to_do(
    shared: Manager, fork: Callable[..., Child]
) -> None:
    engine = fork(CUDA_VISIBLE_DEVICES="")
    for options in ({}, {"fallback": True}):
        with pytest.raises(Raised) as told:
            engine(
                inside.attach, shared.settings.model.path, socket_path=str(shared.socket), **options
            )
        assert told.value.kind == "UnsupportedPlatformForIPCError"
        assert told.value.code == "unsupported"
        assert "CUDA_VISIBLE_DEVICES" in told.value.text
        assert 'options={"memory": "host"}' in told.value.text


def test_so_is_one_of_transformers_however_much_it_may_fall_back(
    shared: Manager, fork: Callable[..., Child]
) -> None:
    engine = fork(CUDA_VISIBLE_DEVICES="")
    options = {"fallback": True, "socket_path": str(shared.socket)}
    with pytest.raises(Raised) as told:
        engine(inside.same_answers, shared.settings.model.path, options)
    assert told.value.kind == "UnsupportedPlatformForIPCError"


def test_an_engine_finds_its_daemon_by_uuid_whatever_it_calls_the_gpu(
    shared: Manager, fork: Callable[..., Child], gpu: str, model: Path
) -> None:
    for written in ("0", gpu, gpu[:12]):
        engine = fork(CUDA_VISIBLE_DEVICES=written)
        number = engine(inside.attach, str(model), socket_dir=shared.settings.socket_dir)
        assert engine(inside.unlike, number, str(model)) == []
        assert engine(inside.make_context) == gpu
