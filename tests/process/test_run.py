"""`preloadd run` as an operator starts it: all ranks of a group on one node, or each node's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from preloadd.domain.ids import device_id
from preloadd.domain.lifecycle import State
from preloadd.domain.placement import Parallel, Placement, place
from preloadd.engine.client import Attachment, attach
from preloadd.engine.native import NativeCheckpoint
from preloadd.engine.options import Options
from preloadd.errors import Unavailable
from preloadd.linux.fds import OwnedFd
from preloadd.memory.host import HostMapper
from preloadd.protocol.messages import Reason, StatusTold
from preloadd.transport.status import ask_status
from tests.checkout import ROOT
from tests.checkpoints import MOE, llama, stored
from tests.leases import content
from tests.waiting import PATIENCE_S, eventually

HEADS = 64 * 64 * 2
"""Bytes of all queries' weights of a layer."""


class Node:
    """A launcher with what it has said so far, and the sockets of its ranks."""

    def __init__(self, process: subprocess.Popen[str], sockets: Path) -> None:
        self.process = process
        self.sockets = sockets
        self.said = ""

    def until(self, text: str) -> None:
        while text not in self.said:
            line = self.process.stdout.readline()
            assert line, f"the launcher ended without {text!r}: {self.said}"
            self.said += line

    def fill(self) -> None:
        """Leave no room in the pipe that it writes to, with dots."""
        there = f"/proc/{self.process.pid}/fd/1"
        with OwnedFd(os.open(there, os.O_WRONLY | os.O_NONBLOCK)) as pipe:
            with suppress(BlockingIOError):
                while os.write(pipe.fileno(), b"." * 4096):
                    pass

    def rank(self, device: str) -> int:
        """The process of a rank that serves."""
        return self.status(device).pid

    def status(self, device: str) -> StatusTold:
        return ask_status(self.sockets / device / "rank.sock", timeout=PATIENCE_S)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> int:
        rest, _ = self.process.communicate(timeout=PATIENCE_S)
        self.said += rest
        return self.process.returncode

    @contextmanager
    def attached(self, model: Path, device: str, placement: Placement) -> Iterator[Attachment]:
        """A lease of what an engine at `placement` asks this device for."""
        wanted = NativeCheckpoint(model).wanted(
            device_id(device), client="test", placement=placement
        )
        options = Options(socket_dir=self.sockets, connect_timeout_s=PATIENCE_S)
        lease = attach(wanted, options, HostMapper(), environ={}, uid=os.geteuid())
        try:
            yield lease
        finally:
            lease.close()


Launch = Callable[..., Node]


@pytest.fixture
def launch(socket_dir: Path) -> Iterator[Launch]:
    """Starts launchers, each with a folder of its own; `within` are words before the command."""
    with ExitStack() as owned:

        def launch(model: Path, *flags: str, within: tuple[str, ...] = ()) -> Node:
            sockets = socket_dir / str(len(list(socket_dir.iterdir())))
            sockets.mkdir(mode=0o700)
            command = [
                *(*within, sys.executable, "-m", "preloadd.launcher", str(model)),
                *("--memory", "host", "--weight-cache-socket-dir", str(sockets), *flags),
            ]
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "XDG_CACHE_HOME": str(sockets)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            owned.enter_context(process)
            owned.callback(process.kill)
            return Node(process, sockets)

        yield launch


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return llama(tmp_path / "moe", config=MOE)


def expected(model: Path, placement: Placement, *, of: set[int]) -> dict[str, bytes]:
    """Queries and experts of the first layer that a rank has to hold."""
    layer = "model.layers.0"
    whole = {name: data for name, data in stored(model).items() if name.startswith(layer)}
    queries = whole[f"{layer}.self_attn.q_proj.weight"]
    half = HEADS // 2 * placement.tensor_rank
    return {
        name: data
        for name, data in whole.items()
        if ".experts." in name and int(name.split(".")[5]) in of
    } | {f"{layer}.self_attn.q_proj.weight": queries[half : half + HEADS // 2]}


def held(lease: Attachment) -> dict[str, bytes]:
    found = content(lease).items()
    told = (".experts.", ".q_proj.")
    return {n: d for n, d in found if n.startswith("model.layers.0.") and any(p in n for p in told)}


PARALLEL = Parallel(tensor=2, data=2, expert=True)
SIZES = ("-tp", "2", "-dp", "2", "-ep")


def test_replicas_share_experts_on_one_node(launch, moe):
    node = launch(moe, *SIZES)
    node.until("engines connect")
    for rank in range(4):
        placement = place(PARALLEL, rank)
        with node.attached(moe, f"CPU-{rank}", placement) as lease:
            assert held(lease) == expected(moe, placement, of={rank})
    assert node.stop() == 130
    assert ", 4 ranks, " in node.said
    assert not list(node.sockets.glob("CPU-*/*.sock"))


def test_what_it_says_holds_up_nobody_if_it_is_not_read(launch, moe):
    node = launch(moe, "--restart-ranks")
    node.until("engines connect")
    node.fill()
    for _ in range(3):
        with node.attached(moe, "CPU-0", place(Parallel(), 0)) as lease:
            assert content(lease)
    first = node.rank("CPU-0")
    os.kill(first, signal.SIGKILL)
    with node.attached(moe, "CPU-0", place(Parallel(), 0)) as lease:
        assert content(lease)
    assert node.rank("CPU-0") != first
    node.process.terminate()
    assert node.process.wait(PATIENCE_S) == 143
    assert "stopping: received SIGTERM" not in node.process.stdout.read()


def test_ranks_of_two_checkpoints_let_nobody_in_until_they_are_of_one(launch, tmp_path):
    model, other = llama(tmp_path / "model"), llama(tmp_path / "other", seed=2)
    node = launch(model, "-tp", "2", "--restart-ranks")
    node.until("engines connect")
    of_first = place(Parallel(tensor=2), 0)
    model.rename(tmp_path / "before")
    other.rename(model)

    def started_anew(device: str, *, divided: bool) -> None:
        """Have a rank die, and wait until all serve again."""
        before = node.rank(device)
        os.kill(before, signal.SIGKILL)
        eventually(lambda: node.rank(device) != before, lambda: "another life")
        eventually(
            lambda: all(
                told.state is State.SERVING and bool(told.divided) == divided
                for told in (node.status("CPU-0"), node.status("CPU-1"))
            ),
            lambda: f"two ranks, {divided=}: {node.status('CPU-0')}",
        )

    started_anew("CPU-0", divided=True)
    with pytest.raises(Unavailable, match="CPU-1 and CPU-0 have weights of different") as apart:
        with node.attached(model, "CPU-0", of_first):
            pass
    assert apart.value.reason == Reason.INCOMPLETE
    started_anew("CPU-1", divided=False)
    with node.attached(model, "CPU-0", of_first) as lease:
        assert content(lease)
    assert node.stop() == 130


@pytest.mark.parametrize("ranks", [1, 2])
def test_why_a_rank_fails_is_told_once(launch, tmp_path, ranks):
    (tmp_path / "empty").mkdir()
    node = launch(tmp_path / "empty", *(["-dp", "2", "-ep"] if ranks == 2 else []))
    assert node.end() == 65
    assert 1 <= node.said.count("has no .safetensors files") <= ranks, node.said
    assert "ERROR" not in node.said


def test_nothing_of_a_group_stays_but_its_locks(launch, moe, tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    node = launch(moe, "--python", str(other))
    node.until("engines connect")
    assert (node.sockets / "CPU-0/python/preloadd").exists()
    assert node.stop() == 130
    left = [path.name for path in (node.sockets / "CPU-0").iterdir()]
    assert left == ["rank.lock"]


@pytest.fixture
def network() -> Iterator[tuple[str, ...]]:
    """Words before a command that run it in a network of its own, whose address all nodes reach."""
    if os.geteuid() != 0:
        pytest.skip("only root can make networks")
    up = f"ip link set lo up && ip address add {ADDRESS}/32 dev lo && echo up && cat"
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", up],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        try:
            if holder.stdout.readline() != "up\n":
                pytest.skip("no network can be made here")
            yield ("nsenter", f"--net=/proc/{holder.pid}/ns/net", "--")
        finally:
            holder.stdin.close()


ADDRESS = "10.99.0.1"
MEETING = ("--data-parallel-address", ADDRESS, "--weight-cache-master-port", "29600")


def test_two_nodes_hold_the_model_between_them(launch, moe, network):
    nodes = [
        launch(moe, *SIZES, *MEETING, "-n", "2", "-r", number, within=network) for number in "01"
    ]
    for node in nodes:
        node.until("engines connect")
    for rank in range(4):
        placement = place(PARALLEL, rank)
        with nodes[rank // 2].attached(moe, f"CPU-{rank % 2}", placement) as lease:
            assert held(lease) == expected(moe, placement, of={rank})
    assert [node.stop() for node in nodes] == [130, 130]
    assert f"ranks 2 to 3 of 4 are here; all meet at {ADDRESS} port 29600\n" in nodes[1].said


def test_nodes_that_are_told_different_things_both_end_with_the_reason(
    launch, moe, tmp_path, network
):
    (tmp_path / "other").mkdir()
    other = llama(tmp_path / "other/moe", config=MOE, seed=1)
    told = (*SIZES, *MEETING, "--data-parallel-size-local", "1", "--data-parallel-start-rank")
    first = launch(moe, *told, "0", within=network)
    second = launch(other, *told, "1", within=network)
    assert first.end() == second.end() != 0
    for node in (first, second):
        assert "checkpoint" in node.said, node.said


def test_what_nodes_cannot_be_told_is_said_before_anything_starts(launch, moe):
    node = launch(moe, *SIZES, "-n", "2", "-r", "2", "-dpa", "127.0.0.1")
    assert node.end() == 78
    first, *faults = node.said.splitlines()
    assert first == "preloadd run:"
    assert [line.strip().partition(":")[0] for line in faults] == [
        *("--node-rank", "--data-parallel-address", "--weight-cache-master-port"),
    ]


def test_ranks_that_cannot_hold_the_model_between_them_are_not_started(launch, moe):
    node = launch(moe, "-tp", "3")
    assert node.end() not in (0, 130)
    assert "CPU-" not in node.said, node.said
