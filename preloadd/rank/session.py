"""One client of a rank: its requests go to the service, the lease it may become stays here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import assert_never

import anyio

from preloadd.domain.access import Policy, is_operator
from preloadd.domain.ids import LeaseId
from preloadd.domain.leases import Lease
from preloadd.errors import ErrorCode, PreloadError
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import sealed_bytes
from preloadd.protocol import messages as m
from preloadd.rank.fellows import Fellows
from preloadd.rank.service import Service
from preloadd.rank.telling import divided
from preloadd.transport.aio import Session
from preloadd.transport.threads import Threads
from preloadd.warmup.names import is_config_hash

log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""Seconds that an engine is kept waiting for ranks that are just about to serve."""

_OPEN_S = 15.0
"""Seconds that a release waits for another rank to end a warm-up."""

_POLL_S = 0.01
_FINDERS = 2

_FIND_S = 20.0
"""Seconds that finding warm-up state may take, waiting for others included: engines wait for 30."""

_TELL_S = 1.0
"""Seconds that a watcher may take to make room for a change of state, or it is hung up on."""


Find = Callable[[str], Mapping[str, bytes]]
"""All there is for a configuration, by its hash: names of files and what they hold. May block."""


class Desk:
    """Answers clients out of `service`. One for the whole daemon; `serve` once a connection.

    `warm` finds warm-up state, by the names of its kinds.
    """

    def __init__(
        self,
        service: Service,
        policy: Policy,
        fellows: Fellows,
        warm: Mapping[str, Find] = MappingProxyType({}),
    ) -> None:
        self._service = service
        self._policy = policy
        self._fellows = fellows
        self._divided_told = ""
        self._warm = warm
        self._threads = {kind: Threads(f"the disk, for {kind},") for kind in warm}
        # Of bundles several at once would be much memory.
        self._finders = anyio.CapacityLimiter(_FINDERS)

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
                return await self._release(session, lease, operator=operator)
            case m.Load():
                await self._load(session, lease, operator=operator)
            case m.Profiling():
                answer = service.profiling(lease, active=request.active)
                # Also so that nobody can say it more often than the manager can be told.
                await service.told()
                await session.answer(answer)
            case m.Memory():
                await session.answer(service.memory(request))
            case m.Status():
                await session.answer(service.status(self._divided()))
            case m.Watch():
                await self._watch(session)
            case m.WarmupAsked():
                await self._tell_warm(session, request)
            case unreachable:
                assert_never(unreachable)
        return lease

    async def _release(
        self, session: Session, lease: Lease | None, *, operator: bool
    ) -> Lease | None:
        """Free the weights; answered when no copy of them is left here or with the manager.

        Whether it may be is decided twice: other engines may come while it waits.
        """
        asker = lease.id if lease else None
        if operator and lease is None:
            await self._end_warmup()
        if self._service.release_refusal(asker, operator=operator) is None:
            await self._undisturbed(session, "a release", asker)
        answer = self._service.release(asker, operator=operator)
        if isinstance(answer, m.Done):
            who = lease.client if lease is not None else f"user {session.peer.uid}"
            log.info("weights released by %s (pid %d)", who, session.peer.pid)
            self._end(lease)
            lease = None
            left = await self._service.settled()
            if left is not None:
                answer = m.Refused(code=ErrorCode.INTERNAL, detail=left)
        await session.answer(answer)
        return lease

    async def _end_warmup(self) -> None:
        """End the warm-up of this group, if there is one, and wait until it has let go.

        Where another rank has begun it, that one is asked to release as well, by whoever asks here.
        """
        await self._service.end_warmup("the weights are to be released")
        with anyio.move_on_after(_OPEN_S):
            await self._fellows.opened()
            while self._service.rehearses:  # noqa: ASYNC110 - its connections are closed already
                await anyio.sleep(_POLL_S)

    async def _load(self, session: Session, lease: Lease | None, *, operator: bool) -> None:
        """Load again. At its end the loader frees what it needed besides the weights."""
        if self._service.load_refusal(operator=operator) is None:
            await self._undisturbed(session, "a load", lease.id if lease else None)
        await session.answer(self._service.load(operator=operator))

    async def _undisturbed(self, session: Session, what: str, asker: LeaseId | None) -> None:
        """Keep this client waiting while engines profile, and nobody else."""
        profilers = self._service.profilers(asker)
        if profilers:
            names = ", ".join(f"{each.client} (pid {each.pid})" for each in profilers)
            log.info("%s for %s waits: %s measures free memory", what, session, names)
            await self._service.undisturbed(asker)

    def _divided(self) -> str:
        """Why nobody gets these weights, where fellows have those of another checkpoint; else ''.

        The supervisor asks all the time, so that the log has it when it begins.
        """
        apart = self._fellows.apart(self._service.checkpoint)
        told = divided(self._service.settings, apart) if apart else ""
        if told and told != self._divided_told:
            log.warning("%s", told)
        self._divided_told = told
        return told

    async def _attach(self, session: Session, request: m.Attach) -> Lease | None:
        refusal = self._service.refusal(request) or self._barred(request)
        if refusal is None:
            await self._fellows.whole(_PATIENCE_S)
            refusal = self._service.incomplete(self._fellows.missing, self._divided())
        # They may have begun to warm up while they were waited for.
        refusal = refusal or self._barred(request)
        if refusal is not None:
            await session.answer(refusal)
            return None
        outcome = self._service.attach(request, pid=session.peer.pid)
        if isinstance(outcome, (m.Mismatched, m.NotAvailable, m.Refused)):
            await session.answer(outcome)
            return None
        lease, granted, descriptors = outcome
        # It holds from before the engine knows of it, so that no release comes in between.
        own = bool(request.rehearsal) and self._service.warms_up(self._fellows.warming)
        self._service.lease_began(lease, session.fileno(), rehearsal=own)
        try:
            arrived = await session.answer(granted, descriptors)
        except Exception:
            self._end(lease)
            raise
        finally:
            for fd in descriptors:
                fd.close()
        if arrived:
            log.info("%s (pid %d) attached, %s", lease.client, lease.pid, lease.mode)
        return lease

    def _barred(self, request: m.Attach) -> m.NotAvailable | None:
        """The answer to an engine that has to wait until this group has warmed up, or None."""
        return self._service.barred(request, self._fellows.warming)

    async def _tell_warm(self, session: Session, asked: m.WarmupAsked) -> None:
        """Hand over what there is, whole or not at all; what cannot be found is not there."""
        found: dict[str, OwnedFd] = {}
        if (find := self._warm.get(asked.kind)) and is_config_hash(asked.config_hash):
            try:
                finding = partial(find, asked.config_hash)
                with anyio.fail_after(_FIND_S):
                    async with self._finders:
                        contents = await self._threads[asked.kind].run(finding)
                found = await anyio.to_thread.run_sync(_sealed, contents)
            except TimeoutError:
                log.warning("no %s are handed over: not found within %g s", asked.kind, _FIND_S)
            except (PreloadError, OSError) as error:
                log.warning("what there is of %s cannot be handed over: %s", asked.kind, error)
        fds = list(found.values())
        try:
            sizes = tuple(os.fstat(fd.fileno()).st_size for fd in fds)
            await session.answer(m.WarmupTold(names=tuple(found), sizes=sizes), fds)
        finally:
            for fd in fds:
                fd.close()

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
            # A daemon that stops cancels this task while it tells just that.
            with anyio.move_on_after(_TELL_S, shield=True):
                await session.answer(state)

    def _end(self, lease: Lease | None) -> None:
        if lease is not None:
            log.info("%s (pid %d) detached", lease.client, lease.pid)
            self._service.lease_ended(lease)


def _sealed(contents: Mapping[str, bytes]) -> dict[str, OwnedFd]:
    """Each in memory of its own, the caller's; nothing if it is too much for one packet."""
    if len(contents) > m.MAX_WARMUP:
        return {}
    found: dict[str, OwnedFd] = {}
    with ExitStack() as undo:
        for name, content in contents.items():
            found[name] = undo.enter_context(sealed_bytes("preloadd-warmup", content))
        undo.pop_all()
    return found
