"""Asks every rank how it is: all at once and each with a deadline, so that none delays another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from preloadd.domain.ids import Instance
from preloadd.errors import PreloadError
from preloadd.protocol.messages import StatusTold
from preloadd.supervisor.verdict import Engine, Snapshot
from preloadd.transport.status import ask_status

FRESH_FOR = 0.5
"""Seconds for which an answer is told again: many probes cost the ranks no more than one."""


class Lookout:
    """Watches the ranks of one group by their sockets below `socket_dir`."""

    def __init__(self, socket_dir: Path, instances: Sequence[Instance], *, timeout: float) -> None:
        self._sockets = {
            instance: socket_dir / str(instance) / instance.socket_name for instance in instances
        }
        self._timeout = timeout
        self._looking = anyio.Lock()
        self._seen: tuple[Snapshot, ...] = ()
        self._seen_at = float("-inf")

    async def look(self) -> tuple[Snapshot, ...]:
        """One snapshot of each rank, in order, at most `FRESH_FOR` seconds old."""
        async with self._looking:
            if anyio.current_time() - self._seen_at >= FRESH_FOR:
                self._seen = await self._ask_all()
                self._seen_at = anyio.current_time()
            return self._seen

    async def _ask_all(self) -> tuple[Snapshot, ...]:
        found: dict[Instance, Snapshot] = {}
        threads = anyio.CapacityLimiter(max(1, len(self._sockets)))

        async def ask(instance: Instance, socket: Path) -> None:
            found[instance] = await anyio.to_thread.run_sync(
                take, instance, socket, self._timeout, limiter=threads
            )

        async with anyio.create_task_group() as asking:
            for instance, socket in self._sockets.items():
                asking.start_soon(ask, instance, socket)
        return tuple(found[instance] for instance in self._sockets)


def take(instance: Instance, socket: Path, timeout: float) -> Snapshot:
    """The snapshot of one rank; what keeps it from answering becomes its `problem`. Blocks."""
    try:
        return from_told(instance, ask_status(socket, timeout=timeout))
    except PreloadError as error:
        return Snapshot(str(instance), problem=str(error))


def from_told(instance: Instance, told: StatusTold) -> Snapshot:
    """The snapshot that a rank's answer makes; an answer in another rank's name is a problem."""
    wrong = told.instance != str(instance)
    return Snapshot(
        instance=str(instance),
        state=told.state,
        problem=f"its socket answers as {told.instance}" if wrong else "",
        detail=told.detail,
        pid=told.pid,
        model=told.model,
        generation=told.generation,
        adopted=told.adopted,
        arena_bytes=told.arena_bytes,
        done=told.done,
        total=told.total,
        lease_count=told.lease_count,
        engines=tuple(Engine(lease.client, lease.pid, lease.mode) for lease in told.leases),
    )
