"""`preloadd run` on a host with a GPU: which memory, which device, and who is in the way."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.daemon import Group
from bench.gpu.child import Child
from preloadd.domain.settings import Digest
from preloadd.errors import EXIT_STATUS, ErrorCode
from preloadd.weights.checkpoint import open_checkpoint
from tests.gpu import device
from tests.gpu.inside import engine as inside
from tests.gpu.models import marked
from tests.manager import Manage
from tests.waiting import eventually

Run = Callable[..., Group]
NO_DEVICE = EXIT_STATUS[ErrorCode.NO_DEVICE]


@pytest.fixture
def run(model: Path, socket_dir: Path, environ: dict[str, str], tmp_path: Path) -> Iterator[Run]:
    """`run(flags, of=model, **environ)`: a group in the foreground."""
    with ExitStack() as owned:

        def start(*flags: str, of: Path = model, **more: str) -> Group:
            folder = socket_dir / str(len(list(socket_dir.iterdir())))
            folder.mkdir(mode=0o700)
            return owned.enter_context(Group(of, folder, *flags, environ={**environ, **more}))

        yield start


def test_auto_is_the_gpu_and_says_so(run: Run, gpu: str, engine: Child, model: Path) -> None:
    group = run("--memory", "auto")
    (told,) = group.serving(gpu)
    assert told.backend == "cuda"
    assert told.device == gpu
    assert re.search(f"cuda.*{gpu}", group.told), group.told
    number = engine(inside.attach, str(model), socket_dir=str(group.sockets))
    assert engine(inside.unlike, number, str(model)) == []
    assert engine(inside.facts, number)["devices"] == ["cuda:0"]


def test_host_memory_is_there_for_those_who_ask(run: Run, engine: Child, model: Path) -> None:
    group = run("--memory", "host")
    (told,) = group.serving("CPU-0")
    assert told.backend == "host"
    before = device.used()
    options = {"memory": "host", "socket_dir": str(group.sockets)}
    number = engine(inside.attach, str(model), **options)
    assert engine(inside.unlike, number, str(model)) == []
    assert device.used() == before


@pytest.mark.parametrize(
    ("flag", "visible"),
    [
        ("all", ""),
        ("full", ""),
        ("beginning", ""),
        ("", "index"),
        ("", "full"),
        ("beginning", "beginning"),
    ],
)
def test_a_gpu_has_many_names(run: Run, gpu: str, flag: str, visible: str) -> None:
    if flag == "all" and device.count() > 1:
        pytest.skip("all are more than one rank needs")
    names = {"all": "all", "full": gpu, "beginning": gpu[:12], "index": "0"}
    chosen = ["--gpus", names[flag]] if flag else []
    group = run(*chosen, **({"CUDA_VISIBLE_DEVICES": names[visible]} if visible else {}))
    (told,) = group.serving(gpu)
    assert told.device == gpu


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(run: Run, gpu: str) -> None:
    group = run("--gpus", "GPU-00000000-0000-0000-0000-000000000000")
    assert group.ended() == NO_DEVICE
    assert "GPU-00000000" in group.told
    assert gpu in group.told
    assert "Traceback" not in group.told


def test_a_gpu_that_the_environment_hides_is_refused_with_the_reason(run: Run, gpu: str) -> None:
    group = run("--gpus", gpu, CUDA_VISIBLE_DEVICES="")
    assert group.ended() == NO_DEVICE
    assert "CUDA_VISIBLE_DEVICES" in group.told
    assert "Traceback" not in group.told


def test_without_a_visible_gpu_auto_is_host_memory_and_says_why(run: Run) -> None:
    group = run(CUDA_VISIBLE_DEVICES="")
    group.serving("CPU-0")
    assert "host memory" in group.told
    assert "CUDA_VISIBLE_DEVICES" in group.told


def test_without_a_visible_gpu_cuda_is_refused(run: Run) -> None:
    group = run("--memory", "cuda", CUDA_VISIBLE_DEVICES="")
    assert group.ended() == NO_DEVICE
    assert "CUDA_VISIBLE_DEVICES" in group.told
    assert "--memory host" in group.told


def test_a_gpu_that_is_too_full_is_refused_with_what_is_missing_and_who_has_it(
    run: Run, tmp_path: Path
) -> None:
    wanted = marked(tmp_path / "wanted", 8 << 30, 16)
    with Child() as holder:
        left = holder(inside.take, 4 << 30)
        assert left < 6 << 30
        full = device.used()
        group = run("--memory", "cuda", of=wanted)
        assert group.ended() == EXIT_STATUS[ErrorCode.NO_ROOM]
        assert device.back_at(full)
        told, pid = group.told, holder.pid
    assert "Traceback" not in told
    amounts = [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]{6,}", told)]
    need = open_checkpoint(wanted).nbytes
    assert any(need <= amount <= 1.01 * need for amount in amounts), told
    assert any(amount < 6 << 30 for amount in amounts), told
    assert re.search(rf"\b{pid}\b", told), told


def test_a_loader_that_is_killed_before_the_weights_are_whole_leaves_nothing(
    rank_on: Manage, tmp_path: Path
) -> None:
    before = device.used()
    model = marked(tmp_path / "model", 2 << 30, 16)
    rank = rank_on(model, digest=Digest.FULL, start=False)
    with rank.stuck_loads():
        rank.start()
        rank.until_phase("identifying")
        assert device.used() - before > 2 << 30
        for pid in rank.loaders():
            os.kill(pid, 9)
        assert rank.ended() == 128 + 9
    assert not rank.arena
    assert device.back_at(before)


def test_a_daemon_that_is_killed_in_the_middle_of_a_load_leaves_nothing(
    rank_on: Manage, tmp_path: Path
) -> None:
    before = device.used()
    model = marked(tmp_path / "model", 4 << 30, 16)
    rank = rank_on(model, chunk_bytes=1 << 30, digest=Digest.FULL, start=False)
    with rank.stuck_loads():
        rank.start()
        eventually(lambda: device.used() - before > 1 << 30, lambda: f"memory in use: {rank.log}")
        rank.kill()
        eventually(lambda: not rank.loaders(), lambda: "no loader")
    assert not rank.arena
    assert device.back_at(before)
    rank.start()
    rank.ready()
    assert not rank.status().adopted


def test_a_group_that_is_ended_frees_all(run: Run, gpu: str) -> None:
    before = device.used()
    group = run()
    group.serving(gpu)
    began = time.monotonic()
    group.process.terminate()
    assert group.ended() in (0, 143)
    assert time.monotonic() - began < 10
    assert device.back_at(before)
