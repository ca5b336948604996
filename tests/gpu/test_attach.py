"""Weights in GPU memory as engines see them: every byte, where, how long, and never written."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu.child import Child, Raised
from bench.gpu.meter import NOTHING
from tests.gpu import device
from tests.gpu.inside import engine as inside
from tests.gpu.inside import memory
from tests.gpu.models import marked
from tests.gpu.ranks import attached
from tests.manager import Manage, Manager
from tests.waiting import eventually

CUDA_ERRORS = re.compile(r"CUDA|illegal|access|fault", re.IGNORECASE)


def test_every_tensor_is_what_safetensors_loads(
    shared: Manager, engine: Child, model: Path
) -> None:
    number = attached(engine, shared)
    assert engine(inside.unlike, number, str(model)) == []


def test_an_attachment_takes_no_memory_for_the_weights(
    rank_on: Manage, engine: Child, tmp_path: Path
) -> None:
    rank = rank_on(marked(tmp_path / "model", 512 << 20, 8))
    # The loader's context is gone: what its end frees would hide what attaching takes.
    assert device.settles(lambda: not device.meter().contexts())
    engine(inside.make_context)
    before = device.used()
    number = attached(engine, rank)
    assert device.used() - before < 64 << 20
    assert engine(inside.facts, number)["allocated"] <= 1 << 20


def test_tensors_lie_in_the_daemons_memory(shared: Manager, engine: Child) -> None:
    number = attached(engine, shared)
    told = engine(inside.facts, number)
    assert told["devices"] == ["cuda:0"]
    assert told["generation"] == shared.status().generation
    starts = engine(inside.addresses, number)
    first = min(address for address in starts.values() if address)
    inner = [address - first for address in starts.values() if address]
    assert max(inner) < sum(told["chunks"])
    assert all(address % 512 == 0 for address in inner)
    assert all(engine(inside.is_mapped, address) for address in starts.values() if address)


def test_aliases_and_strides_are_what_the_manifest_says(engine: Child) -> None:
    assert engine(memory.odd_views) == []


def test_a_captured_graph_computes_the_same_before_and_after_the_daemon_was_killed(
    rank_on: Manage, engine: Child, model: Path
) -> None:
    rank = rank_on(model)
    number = attached(engine, rank)
    eager = engine(inside.product, number)
    before = engine(inside.capture, number)
    assert before == eager
    rank.restart()
    assert rank.status().adopted
    assert [engine(inside.replay) for _ in range(3)] == [before] * 3


def test_a_generation_is_mapped_once_in_a_process(
    shared: Manager, engine: Child, model: Path
) -> None:
    one, two = attached(engine, shared), attached(engine, shared)
    starts = engine(inside.addresses, one)
    assert engine(inside.addresses, two) == starts
    assert shared.status().lease_count == 2
    engine(inside.detach, one)
    assert engine(inside.unlike, two, str(model)) == []
    address = starts["matrix.0"]
    assert engine(inside.is_mapped, address)
    engine(inside.detach, two)
    assert not engine(inside.is_mapped, address)
    eventually(lambda: not shared.status().lease_count, lambda: "no lease")


def test_close_unmaps_and_only_the_last_one_frees(rank_on: Manage, tmp_path: Path) -> None:
    nbytes = 1 << 30
    rank = rank_on(marked(tmp_path / "model", nbytes, 16))
    start = device.used()
    with Child() as one:
        one(inside.make_context)
        before = device.used()
        number = attached(one, rank)
        assert device.used() - before < 64 << 20
        address = one(inside.addresses, number)["model.layers.0.mlp.up_proj.weight"]
        rank.close()  # the engine alone keeps the weights now
        held = device.used()
        digests = one(inside.digests, number)
        assert len(set(digests.values())) == 16
        one(inside.detach, number)
        assert not one(inside.is_mapped, address)
        assert device.settles(lambda: device.used() <= held - nbytes + NOTHING)
    assert device.settles(lambda: device.used() <= start - nbytes + NOTHING)


def test_tensors_in_use_are_not_unmapped(shared: Manager, engine: Child, model: Path) -> None:
    number = attached(engine, shared)
    engine(inside.use, number, "matrix.1")
    address = engine(inside.addresses, number)["matrix.1"]
    with pytest.raises(Raised, match="still in use") as told:
        engine(inside.detach, number)
    assert told.value.kind == "BufferError"
    assert engine(inside.is_mapped, address)
    assert shared.status().lease_count == 1
    engine(inside.drop)
    engine(inside.detach, number)
    assert not engine(inside.is_mapped, address)


def test_a_copy_is_the_engines_own_and_the_daemons_is_freed(
    rank_on: Manage, engine: Child, tmp_path: Path
) -> None:
    nbytes = 512 << 20
    model = marked(tmp_path / "model", nbytes, 8)
    engine(inside.make_context)
    before = device.used()
    rank = rank_on(model)
    number = attached(engine, rank, mode="copy")
    assert not rank.arena
    told = rank.status()
    assert (told.state, told.arena_bytes, told.lease_count) == ("released", 0, 0)
    assert device.settles(lambda: device.used() - before < 1.25 * nbytes)
    assert engine(inside.unlike, number, str(model)) == []
    engine(inside.overwrite, number, "model.layers.3.mlp.up_proj.weight")
    assert len(engine(inside.unlike, number, str(model))) == 1


@pytest.mark.parametrize("way", [inside.overwrite, inside.copy_over])
def test_a_write_fails_in_the_writer_and_changes_nothing(
    shared: Manager, fork: Callable[..., Child], model: Path, way: Callable[..., None]
) -> None:
    other, writer = fork(), fork()
    number = attached(other, shared)
    before = other(inside.digests, number)
    product = other(inside.product, number)
    with pytest.raises(Raised) as told:
        writer(way, attached(writer, shared), "matrix.1")
    assert CUDA_ERRORS.search(told.value.text), told.value.text
    assert other(inside.digests, number) == before
    assert other(inside.product, number) == product
    third = fork()
    assert third(inside.unlike, attached(third, shared), str(model)) == []


def test_an_interpreter_that_ends_with_weights_attached_ends_in_peace(
    shared: Manager, model: Path, environ: dict[str, str]
) -> None:
    source = (
        "import sys\n"
        "from preloadd.engine.torch import attach_checkpoint\n"
        "weights = attach_checkpoint(sys.argv[1], options={\n"
        "    'fallback': False, 'socket_path': sys.argv[2]})\n"
        "kept = weights.tensors['matrix.0'].T\n"
        "print(kept.float().sum().item() > 0)\n"
    )
    command = [sys.executable, "-c", source, str(model), str(shared.socket)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_50_descriptors_are_one_arena(rank_on: Manage, engine: Child, tmp_path: Path) -> None:
    chunk = 2 << 20
    model = marked(tmp_path / "model", 50 * chunk, 50)
    rank = rank_on(model, chunk_bytes=chunk)
    assert rank.status().chunks == 50
    number = attached(engine, rank)
    assert engine(inside.unlike, number, str(model)) == []
    rank.restart()
    assert rank.status().adopted
    again = attached(engine, rank)
    assert engine(inside.addresses, again) == engine(inside.addresses, number)


def test_an_engine_that_was_killed_gives_all_back(
    shared: Manager, fork: Callable[..., Child]
) -> None:
    shared.rests()
    for _ in range(3):
        engines = [fork() for _ in range(5)]
        for each in engines:
            each.begin(inside.attach, shared.settings.model.path, socket_path=str(shared.socket))
        assert [each.result() for each in engines] == [0] * 5
        assert shared.status().lease_count == 5
        for each in engines:
            each.kill()
        eventually(lambda: not shared.status().lease_count, lambda: "no lease")
    shared.rests()


@pytest.mark.timeout(240)  # contexts are made one after the other
def test_50_engines_attach_at_once(shared: Manager, fork: Callable[..., Child]) -> None:
    shared.rests()
    engines = [fork() for _ in range(50)]
    for each in engines:
        each.begin(inside.make_context)
    assert len([each.result() for each in engines]) == 50
    before = device.used()
    for each in engines:
        each.begin(inside.attach, shared.settings.model.path, socket_path=str(shared.socket))
    assert [each.result() for each in engines] == [0] * 50
    assert shared.status().lease_count == 50
    assert device.used() - before < 50 * (16 << 20)
    answers = {each(inside.product, 0) for each in engines}
    assert len(answers) == 1
    for each in engines:
        each.close()
    eventually(lambda: not shared.status().lease_count, lambda: "no lease")
    shared.rests()
