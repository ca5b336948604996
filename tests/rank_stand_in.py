"""Ranks that answer as told, from a thread, on sockets and with locks as real ones have."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from preloadd.domain.ids import Instance
from preloadd.domain.lifecycle import State
from preloadd.linux.locks import Lock
from preloadd.protocol import codec
from preloadd.protocol.messages import (
    Done,
    LeaseTold,
    Load,
    Refused,
    Release,
    Reply,
    Request,
    Status,
    StatusTold,
)

GENERATION = "0123456789abcdef" * 2


def lease(client: str, pid: int, *, profiling: bool = False) -> LeaseTold:
    return LeaseTold(
        id="0" * 16,
        client=client,
        pid=pid,
        mode="zero_copy",
        generation=GENERATION,
        profiling=profiling,
    )


def status(instance: str, **told: Any) -> StatusTold:
    """What a rank tells that serves 256 MiB."""
    parsed = Instance.parse(instance)
    serving = {
        "group": "smol",
        "instance": instance,
        "device": parsed.device,
        "role": parsed.role.value,
        "pid": os.getpid(),
        "version": "0.1.0",
        "state": State.SERVING,
        "model": "/srv/smol",
        "backend": "host",
        "builder": "native",
        "generation": GENERATION,
        "tensors": 272,
        "tensor_bytes": 1 << 28,
        "arena_bytes": 1 << 28,
        "chunks": 1,
        "uptime_s": 90.0,
        "ready_s": 1.5,
        "counters": {"loads": 1},
    }
    leases = tuple(told.get("leases", ()))
    return StatusTold(**{**serving, "lease_count": len(leases), **told})


class RankStandIn:
    """Answers on its socket until closed. `told` may be set at any time; None: it keeps silent.

    Whom one of `answers` has nothing for waits until `answer`.
    """

    def __init__(self, folder: Path, told: StatusTold | None, *, locked: bool = True) -> None:
        self.folder = folder
        self.told = told
        self.asked: list[Request] = []
        self.answers: dict[type[Request], Callable[[], Reply | None]] = {}
        self._waiting: list[socket.socket] = []
        self._undo = ExitStack()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if locked:
            self._undo.enter_context(Lock.take(folder, folder.name))
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._undo.callback(self._listener.close)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._wake, self._woken = os.pipe()
        self._undo.callback(os.close, self._wake)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def path(self) -> Path:
        return self.folder / Instance.parse(self.folder.name).socket_name

    def close(self, *, tidy: bool = True) -> None:
        if self._woken >= 0:
            os.close(self._woken)
            self._woken = -1
            self._thread.join()
            self._undo.close()
        if tidy:
            self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        clients: list[socket.socket] = []
        while True:
            ready, _, _ = select.select([self._wake, self._listener, *clients], [], [])
            if self._wake in ready:
                break
            if self._listener in ready:
                clients.append(self._listener.accept()[0])
            for client in [c for c in clients if c in ready]:
                self._hear(client, clients)
        for client in clients:
            client.close()

    def _hear(self, client: socket.socket, clients: list[socket.socket]) -> None:
        data = client.recv(1 << 16)
        if not data:
            clients.remove(client)
            client.close()
            return
        request = codec.decode_request(data)
        self.asked.append(request)
        if self.told is None:
            return
        reply = self._answer(request)
        if reply is None:
            self._waiting.append(client)
        else:
            client.send(codec.encode(reply))

    def answer(self, reply: Reply) -> None:
        """Answer all who still wait."""
        while self._waiting:
            self._waiting.pop().send(codec.encode(reply))

    def _answer(self, request: Request) -> Reply | None:
        assert self.told is not None
        if type(request) in self.answers:
            return self.answers[type(request)]()
        match request:
            case Status():
                return self.told
            case Release():
                self.become(state=State.RELEASED, generation="", arena_bytes=0)
                return Done()
            case Load():
                self.become(state=State.SERVING, generation=GENERATION, arena_bytes=1 << 28)
                return Done()
        return Refused(code="internal", detail="a stand-in does not do that")

    def become(self, **told: Any) -> None:
        """Tell something else from now on."""
        assert self.told is not None
        self.told = msgspec.structs.replace(self.told, **told)


class Ranks:
    """Ranks below one socket directory."""

    def __init__(self, socket_dir: Path) -> None:
        self.socket_dir = socket_dir
        self._started: list[RankStandIn] = []

    def serve(self, instance: str, *, locked: bool = True, **told: Any) -> RankStandIn:
        return self._start(instance, status(instance, **told), locked=locked)

    def hang(self, instance: str) -> RankStandIn:
        return self._start(instance, None)

    def leave(self, instance: str) -> None:
        """What a rank leaves that was killed."""
        self._start(instance, None).close(tidy=False)

    def _start(self, instance: str, told: StatusTold | None, *, locked: bool = True) -> RankStandIn:
        rank = RankStandIn(self.socket_dir / instance, told, locked=locked)
        self._started.append(rank)
        return rank

    def close(self) -> None:
        for rank in self._started:
            rank.close()
