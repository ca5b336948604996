"""What a rank does so that engines start fast, as its daemon has it: tables, compiled code, and a
rehearsal, which makes both."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from preloadd.domain.settings import Builder, RankSettings
from preloadd.protocol.messages import Progress
from preloadd.rank.fellows import Fellows
from preloadd.rank.gate import Gate
from preloadd.rank.loading import tell_on
from preloadd.rank.service import Service
from preloadd.rank.session import Find
from preloadd.rank.warmup.compiled_code import CompiledCode
from preloadd.rank.warmup.mark import Mark
from preloadd.rank.warmup.rehearsal import Outcome, Rehearsal, Rehearsed, hindrance, rehearse
from preloadd.rank.warmup.rehearsal_engine import OnProgress, cancel_at_the_end
from preloadd.rank.warmup.tables import Tables
from preloadd.warmup.seeding.compile_cache import KIND as CODE
from preloadd.warmup.seeding.compile_cache import WHOLE
from preloadd.warmup.seeding.kinds import Kind
from preloadd.warmup.seeding.tables import KIND as TABLES

log = logging.getLogger(__name__)

_MAX_TOLD = 600
_LOOKING = Progress(phase="looking for what others have warmed up")


class WarmUp:
    """The warm-up of one rank. Without a `rehearsal` there is nothing but `tables`; `code` is what
    sees to what the engine of one compiles. Whatever comes of it, the weights are served.

    `open` and `begin` before a load, `loaded` after it, then `finish` once others can connect, or
    `give_up`; or `adopted`. `work` beside serving.
    """

    def __init__(
        self,
        settings: RankSettings,
        tables: Tables,
        rehearsal: Rehearsal | None = None,
        code: CompiledCode | None = None,
    ) -> None:
        self._settings = settings
        self._tables = tables
        self._rehearsal = rehearsal
        self._code = code
        self._gate: Gate | None = None
        self._line = ""
        self._mark = Mark(Path(settings.socket_dir, settings.instance))
        self._was_cold = False
        self._finished = anyio.Event()

    # -- what a load does --

    async def open(self) -> None:
        """Open the stores, unless they are; ConfigError for any that cannot be used."""
        await self._tables.open()

    def begin(self, service: Service) -> None:
        """Weights are to be loaded: nobody gets them before they are warm."""
        if self._rehearsal is None:
            self._mark.clear()
            return
        self._line, self._gate = "", service.close_gate()
        self._was_cold = self._mark.left() is not None
        self._mark.begin()

    def give_up(self, service: Service) -> None:
        """There are no weights to warm up."""
        self._gate = None
        service.open_gate()

    def loaded(self, generation: str) -> None:
        """Keep what the loader told for the next life, which adopts its weights."""
        self._tables.loaded(generation)

    def adopted(self, generation: str) -> None:
        """Weights of an earlier life are served at once, as warm as that has left them."""
        self._tables.adopted(generation, makes=self._rehearsal is not None)
        if self._code is not None and self._tables.warmable is not None:
            self._code.adopted(self._tables.warmable)
        if self._rehearsal is not None and (left := self._mark.left()) is not None:
            self._line = left[:_MAX_TOLD] or _cut_off(self._settings.group)
            log.warning("%s", self._line)

    async def finish(
        self, service: Service, fellows: Fellows, on_progress: OnProgress
    ) -> Rehearsed | None:
        """Rehearse, unless all that would make is there or was had elsewhere: None then, and if
        there was nothing to do. The gate is open afterwards."""
        started = anyio.current_time()
        try:
            done = await self._rehearsed(fellows, on_progress)
        finally:
            service.open_gate()
        service.warmed_s = anyio.current_time() - started
        # What one left that came to no good end may be half of it.
        if done is not None and done.outcome is Outcome.DONE:
            await self._tables.rehearsed()
            if self._code is not None:
                await self._code.rehearsed()
        if self._code is not None:
            self._code.let_go()
        self._finished.set()
        return done

    async def _rehearsed(self, fellows: Fellows, on_progress: OnProgress) -> Rehearsed | None:
        gate, self._gate = self._gate, None
        if self._rehearsal is None or gate is None:
            return None
        done = await self._tried(self._rehearsal, gate, fellows, on_progress)
        self._line = "" if done is None else str(done)
        if done is None or done.outcome is Outcome.DONE:
            self._mark.clear()
        else:
            self._mark.fail(self._line)
        return done

    async def _tried(
        self, rehearsal: Rehearsal, gate: Gate, fellows: Fellows, on_progress: OnProgress
    ) -> Rehearsed | None:
        started = anyio.current_time()
        within = self._settings.warmup.deadline
        warm = await self._looked(gate, on_progress, within)
        if warm:
            return None
        if warm is None:
            late = f"looking for what is there took longer than {within:g} s"
            return Rehearsed.of(gate, late, started)
        left = started + within - anyio.current_time()
        return await rehearse(rehearsal, self._settings, gate, fellows, on_progress, within=left)

    async def _looked(self, gate: Gate, on_progress: OnProgress, within: float) -> bool | None:
        """Whether it is warm; None if that is not known in time, or nobody may wait."""
        found: bool | None = None
        with anyio.move_on_after(within):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel_at_the_end, gate, tasks.cancel_scope)
                tasks.start_soon(tell_on, on_progress, _LOOKING)
                found = await self._is_warm()
                tasks.cancel_scope.cancel()
        return found

    async def _is_warm(self) -> bool:
        """Whether engines find all that one of this rank's own would make: tables and compiled
        code, as far as they are kept in files that can be told."""
        told = self._tables.warmable
        if told is None:
            return False
        tuned = not told.root or await self._tables.found()
        code = self._code
        had = code is not None and await code.found(told, within=self._tables.patience)
        if not told.root and not told.untuned:
            # FlashInfer's own store shows nothing: it is filled where an engine of this host did
            # all it does, which a fetched bundle does not tell.
            before = code is not None and code.as_before and not self._was_cold
            tuned = had and (before or not self._settings.warmup.autotune)
        return tuned and (had or not told.identity)

    # -- beside serving --

    async def work(self) -> None:
        """Give what there is to the stores, for as long as the daemon lives; code once this rank is
        warm."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tables.work)
            await self._finished.wait()
            if self._code is not None:
                tasks.start_soon(self._code.work)

    async def settled(self) -> None:
        """Wait until others can be answered what there was at first."""
        if self._code is not None:
            await self._code.settled.wait()

    # -- what others hear --

    def kinds(self) -> Sequence[Kind]:
        """What peers may ask for."""
        code = [] if self._code is None else [self._code.kind]
        return [self._tables.kind, *code]

    def given(self) -> Mapping[str, Find]:
        """What finds what engines may ask for besides weights, by the names of its kinds."""
        found: dict[str, Find] = {TABLES: self._tables.tables_of}
        if self._code is not None:
            found[CODE] = self._code.answer_of
            found[WHOLE] = self._code.bundle_of
        return found

    def told(self) -> tuple[str, ...]:
        """Lines for people: how it went, or why no engine warms up where some of vLLM come."""
        code = () if self._code is None else self._code.told()
        return (*self._tables.told(), *code, *self._rehearsal_told())

    def troubles(self) -> tuple[str, ...]:
        """Those of them for which somebody has to do something."""
        return self._tables.troubles()

    def _rehearsal_told(self) -> tuple[str, ...]:
        if self._line:
            return (self._line,)
        wanted = self._settings.warmup.autotune and self._settings.model.builder is Builder.VLLM
        why = hindrance(self._settings) if wanted and self._rehearsal is None else ""
        return (f"no engine warms up here: {why}",) if why else ()


def _cut_off(group: str) -> str:
    return (
        "the warm-up of these weights was cut off as their daemon ended, and the first engine does "
        "it, unless one has since. To have it done before one comes: "
        f"preloadctl release {group}, then preloadctl load {group}"
    )
