"""Ranks that are tasks of the test's own event loop: the supervisor asks them from threads."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest

from preloadd.domain.lifecycle import State
from preloadd.protocol import codec
from preloadd.protocol.messages import StatusTold


class FakeRanks:
    """Listens below `socket_dir`; counts what each instance was asked."""

    def __init__(self, socket_dir: Path) -> None:
        self.socket_dir = socket_dir
        self.asked: dict[str, int] = {}

    def listen(self, instance: str) -> socket.socket:
        """A socket in the place of the instance's; whoever connects waits until it is served."""
        path = self.socket_dir / instance / "rank.sock"
        path.parent.mkdir()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        return listener

    async def serve(self, listener: socket.socket, instance: str, /, **told: Any) -> None:
        """Answer every request on `listener` with a status, for ever."""
        answer = codec.encode(
            StatusTold(
                **{
                    "group": "g",
                    "instance": instance,
                    "device": instance,
                    "role": "target",
                    "pid": os.getpid(),
                    "version": "0",
                    "state": State.SERVING,
                    **told,
                }
            )
        )
        while True:
            await anyio.wait_readable(listener)
            client, _ = listener.accept()
            with client:
                client.setblocking(False)
                await anyio.wait_readable(client)
                client.recv(1 << 16)
                client.send(answer)
            self.asked[instance] = self.asked.get(instance, 0) + 1


@pytest.fixture
def ranks(socket_dir: Path) -> FakeRanks:
    return FakeRanks(socket_dir)
