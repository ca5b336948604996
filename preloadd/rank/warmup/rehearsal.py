"""A rehearsal: one engine that nobody uses, started for what it leaves to those that follow.

vLLM tunes, compiles and captures as it starts, and only there, with all ranks of a group. So the
first rank of a group that stands wholly on this host starts an engine with the group's arguments,
which attaches like any other while others have to wait, says one token, and ends. However that
goes, the weights are served afterwards.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import anyio

from preloadd.domain.ids import Instance, Role
from preloadd.domain.lines import one_line
from preloadd.domain.settings import Builder, Memory, RankSettings
from preloadd.domain.vllm import MODEL_FREE_METHODS
from preloadd.protocol.messages import Progress
from preloadd.rank.caches import Caches, Listing
from preloadd.rank.device import with_all
from preloadd.rank.fellows import Fellows
from preloadd.rank.gate import Gate
from preloadd.rank.loading import tell_on
from preloadd.rank.performance import OnProgress, Performance, cancel_at_the_end
from preloadd.rank.service import Service

log = logging.getLogger(__name__)

MODULE = "preloadd.loader.vllm.rehearse"

_LEFT_S = 2.0
_MAX_WHY = 500
_POLL_S = 0.01
_TELL_EVERY_S = 5.0
_SPECULATION = "--speculative-config"
_LOOKING = Progress(phase="looking for what others have warmed up")
_WAITING = Progress(phase="waiting for the other ranks to warm up with")


class Outcome(StrEnum):
    """How a rehearsal came out."""

    DONE = "done"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """How it came out, after how many seconds, why it was no better, and what is new since."""

    outcome: Outcome
    seconds: float
    why: str = ""
    made: Listing = field(default_factory=Listing)

    def __str__(self) -> str:
        took = f"in {self.seconds:.1f} s"
        if self.outcome is not Outcome.DONE:
            return f"the warm-up {self.outcome} {took}, and the first engine does it: {self.why}"
        tables, compiled = len(self.made.tables), len(self.made.compiled)
        return f"warmed up {took}: {tables} new tables, {compiled} new folders of compiled code"


def hindrance(settings: RankSettings) -> str:
    """Why this rank starts no engine to warm up with, for people; '' if it may."""
    model, instance = settings.model, settings.parsed_instance
    if model.builder is not Builder.VLLM:
        return "weights of the builder native are for engines that warm up by themselves"
    if not settings.warmup.trust_bundles:
        if not settings.warmup.autotune:
            return "it is switched off, and what it would compile is not shared"
        if model.memory is Memory.HOST:
            return "nothing is tuned for a processor, and what it would compile is not shared"
    if instance.role is Role.DRAFT or _drafts(model.engine_args):
        return "a draft model takes part in it: the first engine tunes and compiles"
    world = model.placement.parallel.world
    if settings.rendezvous is not None or len(settings.peers) + 1 != world:
        return "the group is on several hosts: the first engine tunes and compiles"
    if model.placement.rank != 0:
        return "the first rank of the group does it for all"
    return ""


def _drafts(engine_args: Sequence[str]) -> bool:
    """Whether a model guesses for the one that is served, whoever holds it."""
    for word in engine_args:
        name, _, value = word.partition("=")
        if name == _SPECULATION:
            return json.loads(value).get("method") not in MODEL_FREE_METHODS
    return False


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How to rehearse: the engine's command and environment, and where such leave what they make.

    Nothing of the command line is secret: what to start comes over an inherited socket, and the
    pass in the environment.
    """

    argv: Sequence[str]
    environ: Mapping[str, str]
    caches: Caches

    @classmethod
    def of(cls, settings: RankSettings, environ: Mapping[str, str]) -> Self:
        """The one of a group's first rank; in `environ`, its python finds this package."""
        instance = settings.parsed_instance
        peers = [Instance.parse(name).device for name in settings.peers]
        environ = {
            # Nothing of this engine is for others, or to be counted among those that are used.
            "VLLM_HOST_IP": "127.0.0.1",
            **with_all([instance.device, *peers], settings.model.memory, environ),
            "VLLM_NO_USAGE_STATS": "1",
        }
        argv = [settings.python or sys.executable, "-m", MODULE]
        return cls(argv, environ, Caches.of(environ))

    async def run(
        self,
        settings: RankSettings,
        gate: Gate,
        on_progress: OnProgress = lambda _: None,
        *,
        within: float,
    ) -> Rehearsed:
        """One rehearsal, while the ranks of the group serve; nothing of it is left afterwards.

        It takes `within` seconds at most, and less if it is silent for long, or if the gate is to
        be opened. Cancelling ends the engine first. Nothing is raised for what the engine does.
        """
        started = anyio.current_time()
        before = await anyio.to_thread.run_sync(self.caches.listing)
        performance = Performance(settings, within, gate, on_progress)
        why = await performance.of(self.argv, self.environ)
        with anyio.move_on_after(_LEFT_S):
            while gate.leases:  # noqa: ASYNC110 - its connections are closed already
                await anyio.sleep(_POLL_S)
        after = await anyio.to_thread.run_sync(self.caches.listing)
        return _rehearsed(gate, why, started, after.since(before))


class WarmUp:
    """The warm-up of one rank as its daemon has it; nothing to do without a `rehearsal`.

    `begin` before a load, then `finish` once others can connect, or `give_up`.
    """

    def __init__(
        self,
        rehearsal: Rehearsal | None,
        settings: RankSettings,
        service: Service,
        fellows: Fellows,
    ) -> None:
        self._rehearsal = rehearsal
        self._settings = settings
        self._service = service
        self._fellows = fellows
        self._gate: Gate | None = None
        self._last: Rehearsed | None = None

    def begin(self) -> None:
        """Weights are to be loaded: nobody gets them before they are warm."""
        if self._rehearsal is not None:
            self._last, self._gate = None, self._service.close_gate()

    def give_up(self) -> None:
        """There are no weights to warm up."""
        self._gate = None
        self._service.open_gate()

    async def finish(
        self, needless: Callable[[], Awaitable[bool]], on_progress: OnProgress
    ) -> Rehearsed | None:
        """Rehearse, unless that is `needless`, since what it would make was had elsewhere. None if
        it was, or if there was nothing to do. The gate is open afterwards."""
        gate, self._gate = self._gate, None
        if self._rehearsal is None or gate is None:
            return None
        started = anyio.current_time()
        within = self._settings.warmup.deadline
        try:
            looked = await _looked(needless, gate, on_progress, within)
            if looked:
                return None
            if looked is None:
                late = f"looking for what is there took longer than {within:g} s"
                self._last = _rehearsed(gate, late, started)
            else:
                self._last = await rehearse(
                    self._rehearsal,
                    self._settings,
                    self._service,
                    gate,
                    self._fellows,
                    on_progress,
                    within=started + within - anyio.current_time(),
                )
        finally:
            self._service.open_gate()
        return self._last

    def told(self) -> tuple[str, ...]:
        """A line for people: how it went, or why there is none where engines of vLLM come."""
        if self._last is not None:
            return (str(self._last),)
        wanted = self._settings.warmup.autotune and self._settings.model.builder is Builder.VLLM
        why = hindrance(self._settings) if wanted and self._rehearsal is None else ""
        return (f"no engine warms up here: {why}",) if why else ()


async def rehearse(
    rehearsal: Rehearsal,
    settings: RankSettings,
    service: Service,
    gate: Gate,
    fellows: Fellows,
    on_progress: OnProgress = lambda _: None,
    *,
    within: float,
) -> Rehearsed:
    """Rehearse once all ranks of the group serve, and open the gate, whatever comes.

    `within` seconds are all there is for both.
    """
    started = anyio.current_time()
    try:
        if await _whole(fellows, gate, within, on_progress):
            left = started + within - anyio.current_time()
            rehearsed = await rehearsal.run(settings, gate, on_progress, within=left)
        else:
            why = f"these ranks do not serve: {', '.join(fellows.missing)}"
            rehearsed = _rehearsed(gate, why, started)
    except OSError as error:
        # Descriptors or threads that are not to be had are no reason not to serve.
        rehearsed = _rehearsed(gate, f"no engine could be started: {error}", started)
    finally:
        service.open_gate()
    log.log(logging.WARNING if rehearsed.why else logging.INFO, "%s", rehearsed)
    return rehearsed


async def _looked(
    needless: Callable[[], Awaitable[bool]], gate: Gate, on_progress: OnProgress, within: float
) -> bool | None:
    """Whether a rehearsal is `needless`; None if that is not known in time, or nobody may wait."""
    found: bool | None = None
    with anyio.move_on_after(within):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_at_the_end, gate, tasks.cancel_scope)
            tasks.start_soon(tell_on, on_progress, _LOOKING)
            found = await needless()
            tasks.cancel_scope.cancel()
    return found


async def _whole(fellows: Fellows, gate: Gate, within: float, on_progress: OnProgress) -> bool:
    """Wait until all ranks serve; whether they do, and nobody wants the gate open."""
    with anyio.move_on_after(within):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_at_the_end, gate, tasks.cancel_scope)
            while fellows.missing:
                on_progress(_WAITING)
                await fellows.whole(_TELL_EVERY_S)
            tasks.cancel_scope.cancel()
    return not fellows.missing and not gate.ending.is_set()


def _rehearsed(gate: Gate, why: str, started: float, made: Listing | None = None) -> Rehearsed:
    outcome = Outcome.FAILED if why else Outcome.DONE
    if gate.ending.is_set():
        outcome, why = Outcome.ENDED, gate.why
    seconds, why = anyio.current_time() - started, one_line(why)[:_MAX_WHY]
    return Rehearsed(outcome, seconds, why, made if made is not None else Listing())
