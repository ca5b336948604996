"""Asks the supervisors of other nodes how those are, again and again, each in a task of its own.

Nothing is believed of what they say but that they say it: it is shown, and decides nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from functools import partial

import anyio

from preloadd.domain.endpoint import Endpoint
from preloadd.errors import PreloadError
from preloadd.supervisor.introduction import LIMIT, PATH, read
from preloadd.supervisor.nodes import Node, Peer
from preloadd.supervisor.sources import in_thread
from preloadd.transport import web

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
"""Seconds after which even a peer that never answers is asked again, before the jitter."""


class Peers:
    """Other nodes: `watch` for ever, `seen` at any time.

    A peer has `timeout` seconds to answer and is asked every `pause` seconds, more and more rarely
    while it does not answer. One that answers with `identity` is this process, and left out.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], *, identity: str, timeout: float, pause: float
    ) -> None:
        self._posts = [_Post(endpoint, identity, timeout, pause) for endpoint in endpoints]

    async def watch(self) -> None:
        """Ask, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for post in self._posts:
                tasks.start_soon(post.watch)

    def seen(self) -> tuple[Peer, ...]:
        """All nodes but this one, as of now."""
        now = anyio.current_time()
        return tuple(post.peer(now=now) for post in self._posts if not post.is_self)


def pause_after(failures: int, *, pause: float, chance: float) -> float:
    """Seconds until a peer is asked again that did not answer `failures` times in a row.

    `chance`, from 0 to 1, spreads them, so that peers started together do not ask together.
    """
    longer = pause * 2.0 ** min(failures, 16)
    return min(longer, max(pause, LONGEST_PAUSE_S)) * (0.75 + chance / 2)


class _Post:
    """Where one peer is asked from."""

    def __init__(self, endpoint: Endpoint, identity: str, timeout: float, pause: float) -> None:
        self._address = str(endpoint)
        self._identity = identity
        self._get = partial(web.get, endpoint, PATH, timeout=timeout, limit=LIMIT)
        self._timeout = timeout
        self._pause = pause
        self._node: Node | None = None
        self._heard_at: float | None = None
        self._problem = "not asked yet"
        self._failures = 0

    @property
    def is_self(self) -> bool:
        """Whether this process is what answers there."""
        return self._node is not None and self._node.identity == self._identity

    def peer(self, *, now: float) -> Peer:
        """The peer as of the monotonic time `now`."""
        age_s = None if self._heard_at is None else now - self._heard_at
        return Peer(self._address, self._node, age_s, self._problem)

    async def watch(self) -> None:
        """Ask for ever."""
        while True:
            await self._ask()
            chance = random.random()  # noqa: S311 - nobody gains by guessing it
            await anyio.sleep(pause_after(self._failures, pause=self._pause, chance=chance))

    async def _ask(self) -> None:
        """One question; returns when it is over, however long the peer's name takes to resolve."""
        try:
            answer = in_thread(lambda: read(self._get()))
            await asyncio.wait([answer], timeout=2 * self._timeout)
            if not answer.done():
                self._failed("its name is not resolved in time")
            node = await answer
        except PreloadError as error:
            self._failed(str(error))
        except Exception:
            # Whatever a peer may find to upset this program must not end it.
            log.exception("peer %s: not asked", self._address)
            self._failed("this supervisor failed to ask it: its log says why")
        else:
            self._heard(node)

    def _heard(self, node: Node) -> None:
        before, self._problem, self._failures = self._problem, "", 0
        self._node, self._heard_at = node, anyio.current_time()
        if before and self.is_self:
            log.info("peer %s: is this supervisor itself, and left out", self._address)
        elif before:
            log.info("peer %s: answers, as %s", self._address, node.host or "a node without name")

    def _failed(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("peer %s: %s", self._address, problem)
        self._problem = problem
        self._failures += 1
