"""Ranks that are tasks of the test's own event loop, and a view of ranks of every kind."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from preloadd.domain.lifecycle import State
from preloadd.protocol import codec
from preloadd.protocol.messages import Refused
from preloadd.supervisor.devices import Device
from preloadd.supervisor.history import Happening
from preloadd.supervisor.lookout import View
from preloadd.supervisor.nodes import Node, NodeGroup, NodeRank, Peer, shown
from preloadd.supervisor.verdict import Contact, Engine, Snapshot, Unit
from tests.unit.supervisor.given import GIB, HOSTILE, told


class FakeRanks:
    """Listens below `socket_dir`; counts what each instance was asked, and over how many lines."""

    def __init__(self, socket_dir: Path) -> None:
        self.socket_dir = socket_dir
        self.asked: dict[str, int] = {}
        self.lines: dict[str, int] = {}
        self._replies: dict[str, bytes] = {}

    def listen(self, instance: str, backlog: int = 8) -> socket.socket:
        """A socket in the place of the instance's; whoever connects waits until it is served."""
        path = self.socket_dir / instance / "rank.sock"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen(backlog)
        listener.setblocking(False)
        return listener

    async def serve(self, listener: socket.socket, instance: str, /, **fields: Any) -> None:
        """Answer every request with a status (or with `refused`), until cancelled."""
        self.become(instance, **fields)
        async with anyio.create_task_group() as clients:
            while True:
                await anyio.wait_readable(listener)
                client, _ = listener.accept()
                self.lines[instance] = self.lines.get(instance, 0) + 1
                clients.start_soon(self._answer, client, instance)

    def become(self, instance: str, /, **fields: Any) -> None:
        """Have a rank answer this from now on."""
        refused = fields.pop("refused", None)
        reply = Refused(code=refused, detail="not you") if refused else told(instance, **fields)
        self._replies[instance] = codec.encode(reply)

    async def _answer(self, client: socket.socket, instance: str) -> None:
        client.setblocking(False)
        with client:
            while True:
                await anyio.wait_readable(client)
                # Whoever asks may hang up before it reads the answer.
                with suppress(ConnectionError):
                    if client.recv(1 << 16):
                        self.asked[instance] = self.asked.get(instance, 0) + 1
                        client.send(self._replies[instance])
                        continue
                return


@pytest.fixture
def ranks(socket_dir: Path) -> FakeRanks:
    return FakeRanks(socket_dir)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def crowd() -> View:
    """One rank of every kind there is, with names that somebody else chose."""
    usual: dict[str, Any] = {"role": "target", "model": "m", "version": "0", "age_s": 0.2}
    serving = Snapshot(
        "GPU-a",
        State.SERVING,
        group="good",
        device="GPU-a",
        pid=7,
        generation="a" * 32,
        adopted=True,
        tensors=291,
        tensor_bytes=8 * GIB - 1,
        arena_bytes=8 * GIB,
        chunks=8,
        bytes_read=5,
        loads=1,
        uptime_s=60.0,
        ready_s=0.25,
        started_at=1.75e9,
        ask_s=0.001,
        lease_count=12,
        engines=tuple(
            Engine(f"{HOSTILE}{n}", 9, "zero_copy", f"{n:016x}", "a" * 32) for n in range(12)
        ),
        **usual,
    )
    loading = Snapshot(
        "GPU-b.draft", State.LOADING, group=HOSTILE, device="GPU-b", done=1, total=4, **usual
    )
    stuck = Snapshot(
        "CPU-0",
        group=HOSTILE,
        device="CPU-0",
        contact=Contact.STUCK,
        silent_s=7.0,
        arena_bytes=GIB,
        tensor_bytes=GIB,
        **{**usual, "age_s": 7.5},
    )
    absent = Snapshot(
        "CPU-1",
        group="gone",
        device="CPU-1",
        role="target",
        contact=Contact.ABSENT,
        problem="no socket",
        unit=Unit("preloadd@CPU-1.service", "failed", "failed", "exit-code", HOSTILE, 3),
    )
    now = datetime.now(UTC)
    return View(
        now,
        (serving, loading, stuck, absent),
        (Happening(now.timestamp() - 5, HOSTILE, "CPU-0", "stuck", HOSTILE),),
        (
            Device("host", "host memory", 2 * GIB, 8 * GIB),
            Device("GPU-a", "H200", 9 * GIB, 141 * GIB, 1, 2, ((79, 1), (94, 3))),
            Device("GPU-b", "H200", problem="GPU is lost"),
        ),
        HOSTILE,
        peers=peers(),
    )


def peers() -> tuple[Peer, ...]:
    """Another node of every kind there is."""
    serving = tuple(NodeRank(f"CPU-{n}", "serving") for n in range(8))
    failed = NodeRank("GPU-c", "failed")
    well = Node("1" * 32, "node-8", "0.1.0", True, (), (NodeGroup("good", serving),))
    ill = Node(
        *("2" * 32, shown(HOSTILE), "0.1.0", False, (shown(f"GPU-c of gone: {HOSTILE}"),)),
        (NodeGroup("good", serving), NodeGroup("gone", (*serving[:3], failed))),
    )
    old = replace(well, host="node-10", version="0.0.9")
    return (
        Peer("node-8:9470", well, 0.8),
        Peer("[2001:db8::9]:9470", ill, 1.2),
        Peer("node-10:9470", old, 200.0, "no answer within 2 s"),
        Peer("node-11:9470", None, None, "connection refused"),
    )
