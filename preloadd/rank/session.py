"""One client of a rank: its requests go to the service, the lease it may become stays here."""

from __future__ import annotations

import logging
from typing import assert_never

import anyio

from preloadd.domain.access import Policy, is_operator
from preloadd.domain.leases import Lease
from preloadd.protocol import messages as m
from preloadd.rank.service import Service
from preloadd.transport.aio import Session

log = logging.getLogger(__name__)


class Desk:
    """Answers clients out of `service`. One for the whole daemon; `serve` once a connection."""

    def __init__(self, service: Service, policy: Policy) -> None:
        self._service = service
        self._policy = policy

    async def serve(self, session: Session) -> None:
        """Answer one client until it leaves; it may come with a lease from an earlier daemon.

        Cancelling leaves the lease as it is: the daemon goes down, the engine goes on.
        """
        lease = self._service.lease(session.lease)
        try:
            async for request in session:
                lease = await self._answer(session, request, lease)
        except Exception:
            self._end(lease)
            raise
        self._end(lease)

    async def _answer(
        self, session: Session, request: m.Request, lease: Lease | None
    ) -> Lease | None:
        """Answer one request; the lease that this connection is afterwards."""
        service = self._service
        operator = is_operator(self._policy, session.peer)
        match request:
            case m.Attach():
                return await self._attach(session, request)
            case m.Release():
                answer = service.release(lease.id if lease else None, operator=operator)
                if isinstance(answer, m.Done):
                    self._end(lease)
                    lease = None
                await session.answer(answer)
            case m.Load():
                await session.answer(service.load(operator=operator))
            case m.Memory():
                await session.answer(service.memory(request))
            case m.Status():
                await session.answer(service.status())
            case m.Watch():
                await self._watch(session)
            case unreachable:
                assert_never(unreachable)
        return lease

    async def _attach(self, session: Session, request: m.Attach) -> Lease | None:
        outcome = self._service.attach(request, pid=session.peer.pid)
        if isinstance(outcome, (m.Mismatched, m.NotAvailable, m.Refused)):
            await session.answer(outcome)
            return None
        lease, granted, descriptors = outcome
        # It holds from before the engine knows of it, so that no release comes in between.
        self._service.lease_began(lease, session.fileno())
        try:
            await session.answer(granted, descriptors)
        except Exception:
            self._end(lease)
            raise
        finally:
            for fd in descriptors:
                fd.close()
        log.info("%s (pid %d) attached, %s", lease.client, lease.pid, lease.mode)
        return lease

    async def _watch(self, session: Session) -> None:
        state, changed = self._service.changed()
        await session.answer(state)
        async with anyio.create_task_group() as watching:
            watching.start_soon(self._tell, session, changed)
            # A watching client says no more: the next thing to come is its end.
            async for _ in session:
                pass
            watching.cancel_scope.cancel()

    async def _tell(self, session: Session, changed: anyio.Event) -> None:
        while True:
            await changed.wait()
            state, changed = self._service.changed()
            await session.answer(state)

    def _end(self, lease: Lease | None) -> None:
        if lease is not None:
            self._service.lease_ended(lease)
