"""`preloadd run` as an operator starts it: all ranks of a group on one node, or each node's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import preloadd
from preloadd.domain.ids import device_id
from preloadd.domain.placement import Parallel, Placement, place
from preloadd.engine.client import Attachment, attach
from preloadd.engine.native import NativeCheckpoint
from preloadd.engine.options import Options
from preloadd.memory.host import HostMapper
from tests.checkpoints import MOE, llama, stored
from tests.process.conftest import PATIENCE_S, content

ROOT = Path(preloadd.__file__).parents[1]
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
