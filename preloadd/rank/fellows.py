"""The other ranks of this group on this host: whether each of them serves, as it tells itself.

An engine that needs several ranks must not get some of them while others are still loading, or have
weights of another checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import anyio

from preloadd.domain.lifecycle import State
from preloadd.errors import OutOfDescriptors, ProtocolViolation
from preloadd.linux.fds import OwnedFd
from preloadd.linux.seqpacket import connect_now
from preloadd.protocol.connection import ClientConnection
from preloadd.protocol.messages import Reply, StateChanged, Watch
from preloadd.transport.aio import Link

_AGAIN_S = 0.05


class Fellows:
    """Watches the socket of every fellow; `sockets` are their paths by instance."""

    def __init__(self, sockets: Mapping[str, Path]) -> None:
        self._sockets = sockets
        self._serving: dict[str, str] = {}
        self._warming: dict[str, str] = {}
        self._whole = anyio.Event()
        self._opened = anyio.Event()
        self._note()

    @property
    def missing(self) -> list[str]:
        """The fellows that do not serve now."""
        return sorted(self._sockets.keys() - self._serving)

    def apart(self, checkpoint: str) -> list[str]:
        """Those that serve weights of another checkpoint, as far as that is known."""
        return sorted(
            name
            for name, theirs in self._serving.items()
            if theirs and checkpoint and theirs != checkpoint
        )

    @property
    def warming(self) -> frozenset[str]:
        """What is known of the gates of those that warm up now: their digests."""
        return frozenset(self._warming.values())

    async def whole(self, patience_s: float) -> bool:
        """Whether all serve, now or within so many seconds."""
        with anyio.move_on_after(patience_s):
            await self._whole.wait()
        return not self.missing

    async def opened(self) -> None:
        """Wait until none warms up."""
        while self._warming:
            await self._opened.wait()

    async def follow(self) -> None:
        """Keep watching until cancelled."""
        async with anyio.create_task_group() as watching:
            for name, path in self._sockets.items():
                watching.start_soon(self._follow, name, path)

    async def _follow(self, name: str, path: Path) -> None:
        while True:
            try:
                await self._listen(name, path)
            except (OSError, ProtocolViolation, OutOfDescriptors):
                # It is not there, or is coming back: its end and its next start are told apart.
                pass
            finally:
                self._serving.pop(name, None)
                self._warming.pop(name, None)
                self._note()
            await anyio.sleep(_AGAIN_S)

    async def _listen(self, name: str, path: Path) -> None:
        """Note every state that one fellow tells; returns when it hangs up."""
        link = Link(connect_now(path))
        connection = ClientConnection[OwnedFd]()
        try:
            await link.send(connection.request(Watch()).data)
            while True:
                packet = await link.receive()
                packet.close()
                if packet.eof:
                    return
                told = connection.receive(packet.data)
                self._hear(name, told)
        finally:
            link.close()

    def _hear(self, name: str, told: Reply) -> None:
        """Note what one fellow told."""
        known = told if isinstance(told, StateChanged) else None
        self._serving.pop(name, None)
        if known is not None and known.state is State.SERVING:
            self._serving[name] = known.checkpoint
        self._warming.pop(name, None)
        if known is not None and known.warming:
            self._warming[name] = known.warming
        self._note()

    def _note(self) -> None:
        self._opened.set()
        self._opened = anyio.Event()
        if not self.missing:
            self._whole.set()
        elif self._whole.is_set():
            self._whole = anyio.Event()
