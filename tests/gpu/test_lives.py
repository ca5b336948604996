"""What becomes of weights in GPU memory when those who hold them die, one after the other."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from bench.daemon import start_s
from bench.gpu.child import Child
from tests.descriptors import targets
from tests.gpu import device
from tests.gpu.inside import engine as inside
from tests.gpu.models import marked
from tests.gpu.ranks import attached
from tests.manager import Manage, Manager
from tests.waiting import eventually

NBYTES = 1 << 30
TENSORS = 32


def assert_adopted(rank: Manager, generation: str) -> None:
    told = rank.status()
    assert told.adopted
    assert told.generation == generation
    assert (told.counters["loads"], told.counters["bytes_read"]) == (0, 0)
    # From the start of its process, the interpreter's own included.
    took = start_s(told)
    print(f"ready after {took:.3f} s")
    assert took <= 0.5


def test_an_engine_computes_throughout_while_its_daemon_is_killed_again_and_again(
    rank_on: Manage, engine: Child, model: Path, tmp_path: Path
) -> None:
    rank = rank_on(model)
    generation = rank.generation
    number = attached(engine, rank)
    right = engine(inside.product, number)
    until = tmp_path / "enough"
    engine.begin(inside.compute, number, str(until))
    for _ in range(3):
        rank.restart()
        assert_adopted(rank, generation)
        assert rank.status().lease_count == 1
    until.touch()
    answers = engine.result()
    assert {answer for _, answer in answers} == {right}
    longest = max(later - before for (before, _), (later, _) in pairwise(answers))
    print(f"{len(answers)} answers, at most {longest:.3f} s apart")
    assert longest < 0.5


def test_the_daemon_alone_keeps_the_memory(rank_on: Manage, tmp_path: Path) -> None:
    model = marked(tmp_path / "model", NBYTES, TENSORS)
    before = device.used()
    rank = rank_on(model)
    with Child() as engine:
        digests = engine(inside.digests, attached(engine, rank))
    assert device.settles(lambda: not device.meter().contexts())
    arena = rank.status().arena_bytes
    assert NBYTES <= arena <= 1.01 * NBYTES
    # Nothing but the weights: a rank costs no device memory.
    assert device.back_at(before + arena)
    with Child() as engine:
        number = attached(engine, rank)
        assert engine(inside.unlike, number, str(model)) == []
        assert engine(inside.digests, number) == digests


def test_the_managers_descriptors_alone_keep_the_memory(rank_on: Manage, tmp_path: Path) -> None:
    model = marked(tmp_path / "model", NBYTES, TENSORS)
    before = device.used()
    rank = rank_on(model)
    generation = rank.generation
    arena = rank.status().arena_bytes
    rank.kill()
    eventually(lambda: not rank.loaders(), lambda: "no loader")
    assert device.settles(lambda: not device.meter().contexts())
    assert device.back_at(before + arena)
    rank.start()
    rank.ready()
    assert_adopted(rank, generation)
    with Child() as engine:
        assert engine(inside.unlike, attached(engine, rank), str(model)) == []
    rank.signal(signal.SIGTERM)
    assert rank.ended() == 0


def test_a_daemon_that_ends_without_a_manager_frees_all(rank_on: Manage, tmp_path: Path) -> None:
    before = device.used()
    rank = rank_on(marked(tmp_path / "model", NBYTES, TENSORS))
    rank.kill()
    for name in list(rank.parked):
        rank.unpark(name)
    assert device.back_at(before)


def test_engines_of_two_lives_share_one_memory(
    rank_on: Manage, fork: Callable[..., Child], model: Path
) -> None:
    rank = rank_on(model)
    one, two = fork(), fork()
    first = attached(one, rank)
    rank.restart()
    second = attached(two, rank)
    assert one(inside.digests, first) == two(inside.digests, second)
    assert rank.status().lease_count == 2


def test_the_device_node_stays_open_and_is_parked(rank_on: Manage, model: Path) -> None:
    rank = rank_on(model)
    node = f"/dev/nvidia{device.meter().minor()}"

    def opened() -> list[str]:
        return [number for number, target in targets(rank.pid).items() if target == node]

    eventually(lambda: rank.parked.get("device") == 1, lambda: f"{node} is parked: {rank.log}")
    assert len(opened()) == 1
    rank.restart()
    assert len(opened()) == 1
    eventually(lambda: rank.parked.get("device") == 1, lambda: "parked once")
