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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import anyio

from preloadd.domain.ids import Instance, Role
from preloadd.domain.lines import one_line
from preloadd.domain.settings import Builder, Memory, RankSettings
from preloadd.domain.vllm import MODEL_FREE_METHODS
from preloadd.protocol.messages import Progress
from preloadd.rank.device import with_all
from preloadd.rank.fellows import Fellows
from preloadd.rank.gate import Gate
from preloadd.rank.warmup.caches import CacheContents, Caches
from preloadd.rank.warmup.rehearsal_engine import OnProgress, RehearsalEngine, cancel_at_the_end
from preloadd.transport.threads import Threads

log = logging.getLogger(__name__)

MODULE = "preloadd.loader.vllm.rehearse"

_LEFT_S = 2.0
_LIST_S = 10.0
_MAX_WHY = 500
_POLL_S = 0.01
_TELL_EVERY_S = 5.0
_SPECULATION = "--speculative-config"
_EAGER = "--enforce-eager"
_LEAST = "--optimization-level=0"
_MORE = ("--compilation-config", "--kernel-config", "--enable-flashinfer-autotune")
"""What may ask for more than the lowest level does, which neither compiles nor tunes."""
_UNTUNED = "--no-enable-flashinfer-autotune"
_WAITING = Progress(phase="waiting for the other ranks to warm up with")


class Outcome(StrEnum):
    """How a rehearsal came out."""

    DONE = "done"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """How it came out, after how many seconds, why it was no better, and what is new since, as far
    as that is known."""

    outcome: Outcome
    seconds: float
    why: str = ""
    made: CacheContents | None = None

    @classmethod
    def of(cls, gate: Gate, why: str, started: float, made: CacheContents | None = None) -> Self:
        """One that began when the loop's clock said `started`, and ends now; done if there is no
        `why`, and that of the gate if that is to be opened."""
        outcome = Outcome.FAILED if why else Outcome.DONE
        if gate.ending.is_set():
            outcome, why = Outcome.ENDED, gate.why
        return cls(outcome, anyio.current_time() - started, one_line(why)[:_MAX_WHY], made)

    def __str__(self) -> str:
        took = f"in {self.seconds:.1f} s"
        if self.outcome is not Outcome.DONE:
            return f"the warm-up {self.outcome} {took}, and the first engine does it: {self.why}"
        if self.made is None:
            return f"warmed up {took}"
        tables, compiled = len(self.made.tables), len(self.made.compiled)
        return f"warmed up {took}: {tables} new tables, {compiled} new folders of compiled code"


def hindrance(settings: RankSettings) -> str:
    """Why this rank starts no engine to warm up with, for people; '' if it may."""
    model, instance = settings.model, settings.parsed_instance
    if model.builder is not Builder.VLLM:
        return "weights of the builder native are for engines that warm up by themselves"
    if why := _untraced(settings):
        return f"nothing is left for others: engines compile nothing, and {why}"
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


def _untraced(settings: RankSettings) -> str:
    """Why engines that compile nothing tune nothing either; '' if they may do one of both.

    Only what is certain before one has started. What FlashInfer keeps in its own store counts.
    """
    model, versions = settings.model, settings.versions
    words = model.engine_args
    least = _LEAST in words and not any(word.startswith(_MORE) for word in words)
    if not least and _EAGER not in words:
        return ""
    if model.memory is not Memory.CUDA:
        return "FlashInfer tunes on NVIDIA's GPUs only"
    if least or _UNTUNED in words or not settings.warmup.autotune:
        return "tuning is switched off"
    if versions.vllm and not versions.flashinfer:
        return "FlashInfer is not installed beside vLLM"
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
    threads: Threads = field(default_factory=lambda: Threads("what engines leave"))

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
        on_progress: OnProgress,
        *,
        within: float,
    ) -> Rehearsed:
        """One rehearsal, while the ranks of the group serve; nothing of it is left afterwards.

        It takes `within` seconds at most, and less if it is silent for long, or if the gate is to
        be opened. Cancelling ends the engine first. Nothing is raised for what the engine does.
        """
        started = anyio.current_time()
        before = await self._listed()
        engine = RehearsalEngine(settings, within, gate, on_progress)
        why = await engine.run(self.argv, self.environ)
        with anyio.move_on_after(_LEFT_S):
            while gate.leases:  # noqa: ASYNC110 - its connections are closed already
                await anyio.sleep(_POLL_S)
        after = await self._listed()
        made = None if before is None or after is None else after.since(before)
        return Rehearsed.of(gate, why, started, made)

    async def _listed(self) -> CacheContents | None:
        """What is in the folders where engines leave something; None if they do not answer."""
        try:
            return await self.threads.run(self.caches.listing, within=_LIST_S)
        except OSError as error:
            log.warning("what engines have left cannot be listed: %s", error)
        return None


async def rehearse(
    rehearsal: Rehearsal,
    settings: RankSettings,
    gate: Gate,
    fellows: Fellows,
    on_progress: OnProgress,
    *,
    within: float,
) -> Rehearsed:
    """Rehearse once all ranks of the group serve, while the gate is closed.

    `within` seconds are all there is for both.
    """
    started = anyio.current_time()
    try:
        if await _whole(fellows, gate, within, on_progress):
            left = started + within - anyio.current_time()
            rehearsed = await rehearsal.run(settings, gate, on_progress, within=left)
        else:
            why = f"these ranks do not serve: {', '.join(fellows.missing)}"
            rehearsed = Rehearsed.of(gate, why, started)
    except OSError as error:
        # Descriptors or threads that are not to be had are no reason not to serve.
        rehearsed = Rehearsed.of(gate, f"no engine could be started: {error}", started)
    log.log(logging.WARNING if rehearsed.why else logging.INFO, "%s", rehearsed)
    return rehearsed


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
