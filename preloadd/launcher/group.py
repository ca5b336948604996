"""The ranks of one group and their health endpoint, from the first start to the last reaping.

One rank's end ends the group, or is mended where that was asked for. The endpoint's end never ends
the group: the weights matter more.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import assert_never

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from preloadd.domain.lines import one_line
from preloadd.domain.settings import RankSettings
from preloadd.errors import EXIT_STATUS, ErrorCode, PreloadError
from preloadd.launcher.ending import Ending
from preloadd.launcher.health import Health
from preloadd.launcher.policy import Restarts, describe, exit_code, mendable
from preloadd.launcher.private import private_folder
from preloadd.launcher.processes import Process
from preloadd.launcher.progress import Display, Report
from preloadd.launcher.ranks import Rank, Ready, Trouble
from preloadd.launcher.summary import Told, again_text, ready_text, told_by
from preloadd.linux.fds import exhausted, is_exhausted
from preloadd.linux.notify import FAILED
from preloadd.linux.orphans import reap_orphans

STATUS_TIMEOUT = 2.0
"""Seconds that a rank which has just become ready has to tell what it holds."""

REAP_AGAIN = 0.05
"""Seconds until a process of the launcher's own that has ended will have been reaped."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a group is started with.

    `command` gives the command line of a rank; `restarts` is each rank's budget, None where a
    failed rank ends the group. `health` is borrowed; an endpoint that is given up is closed. With
    `reaps_orphans`, every child of this process that the group did not start is reaped. `tokens`
    are handed to ranks that are seeded.
    """

    ranks: tuple[RankSettings, ...]
    command: Callable[[RankSettings], Sequence[str]]
    environ: Mapping[str, str]
    restarts: Restarts | None = None
    health: Health | None = None
    health_restarts: Restarts = field(default_factory=Restarts)
    reaps_orphans: bool = False
    tokens: tuple[str, ...] = field(default=(), repr=False)


async def run_group(launch: Launch, ending: Ending, display: Display) -> None:
    """Serve until `ending` has begun, by a rank's end or otherwise; then stop and reap everything.

    Whatever happens, nothing of the ranks is left behind.
    """
    with ExitStack() as owned:
        # Paths, not abstract names: those are shared with other namespaces of this host.
        folder = owned.enter_context(private_folder())
        ranks = [
            owned.enter_context(
                Rank(
                    settings,
                    launch.command(settings),
                    launch.environ,
                    folder / str(number),
                    launch.tokens,
                )
            )
            for number, settings in enumerate(launch.ranks)
        ]
        await _Group(launch, ranks, ending, display).run()


class _Group:
    def __init__(
        self, launch: Launch, ranks: Sequence[Rank], ending: Ending, display: Display
    ) -> None:
        self._launch = launch
        self._ranks = ranks
        self._ending = ending
        self._display = display
        self._began = anyio.current_time()
        self._announced = False

    async def run(self) -> None:
        """Returns when the last process has been reaped."""
        async with anyio.create_task_group() as helpers:
            helpers.start_soon(self._stop_when_ending)
            if self._launch.reaps_orphans:
                helpers.start_soon(self._reap_orphans)
            for rank in self._ranks:
                helpers.start_soon(self._expire, rank)
            async with anyio.create_task_group() as lives:
                if self._launch.health is not None:
                    lives.start_soon(self._tend_health, self._launch.health)
                for rank in self._ranks:
                    lives.start_soon(self._tend, rank, helpers)
            helpers.cancel_scope.cancel()

    async def _tend(self, rank: Rank, helpers: TaskGroup) -> None:
        """Keep one rank alive for as long as it is to live."""
        restarts = self._launch.restarts
        while self._start(rank):
            async with anyio.create_task_group() as life:
                life.start_soon(self._listen, rank, helpers)
                await anyio.wait_readable(rank.process)
                life.cancel_scope.cancel()
            # What it said last comes before its end: descriptors it parked must not be lost.
            self._take_news(rank, helpers)
            status = rank.end()
            why = f"{rank.name} {describe(status)}{_last_words(rank.status)}"
            if self._ending.begun.is_set() and rank.status.startswith(FAILED):
                # It is not what all end for, but told nowhere else.
                self._display.say(why)
            granted = None
            if restarts is not None and mendable(status, served=rank.served):
                granted = restarts.grant(now=anyio.current_time())
            if granted is None:
                self._ending.because(why, exit_code(status))
                return
            restarts, pause = granted
            if not self._ending.begun.is_set():
                self._display.say(f"{why}: starting it again with what it parked")
            await self._pause(pause)

    async def _tend_health(self, health: Health) -> None:
        """Keep the endpoint alive while the ranks live, unless it fails again and again."""
        restarts = self._launch.health_restarts
        self._display.say(f"health: {health.url}")
        while self._start(health):
            await anyio.wait_readable(health.process)
            status = health.process.end()
            if self._ending.begun.is_set():
                return
            granted = restarts.grant(now=anyio.current_time())
            if granted is None:
                health.close()
                self._display.say(
                    f"the health endpoint {describe(status)} again and again: it is given up, the "
                    "ranks go on; start the group anew to have it back"
                )
                return
            restarts, pause = granted
            self._display.say(f"the health endpoint {describe(status)}: starting it again")
            await self._pause(pause)

    def _start(self, service: Rank | Health) -> bool:
        """Start a process; False if the group ends instead."""
        if self._ending.begun.is_set():
            return False
        try:
            service.start()
        except (OSError, PreloadError) as error:
            told: Exception = error
            if isinstance(error, OSError) and is_exhausted(error):
                told = exhausted(error, "too few files may be opened")
            code = told.code if isinstance(told, PreloadError) else ErrorCode.INTERNAL
            self._ending.because(f"a process cannot be started: {told}", EXIT_STATUS[code])
            return False
        return True

    async def _listen(self, rank: Rank, helpers: TaskGroup) -> None:
        while True:
            await anyio.wait_readable(rank.notify)
            self._take_news(rank, helpers)

    async def _expire(self, rank: Rank) -> None:
        while True:
            await anyio.wait_readable(rank.parked)
            rank.parked.expire()

    def _take_news(self, rank: Rank, helpers: TaskGroup) -> None:
        for news in rank.news():
            match news:
                case Report():
                    self._display.progress(rank.name, news, now=anyio.current_time())
                case Ready():
                    # As of now: the last rank may be found ready before the task runs.
                    helpers.start_soon(partial(self._welcome, rank, again=self._announced))
                case Trouble():
                    self._display.say(f"{rank.name}: {news.text}")
                case unreachable:
                    assert_never(unreachable)

    async def _welcome(self, rank: Rank, *, again: bool) -> None:
        """Tell that a rank serves again, or that now all do."""
        if again:
            self._say_unless_ending(again_text(await _ask(rank)))
        elif not self._announced and all(each.ready for each in self._ranks):
            self._announced = True
            seconds = anyio.current_time() - self._began
            told = [await _ask(each) for each in self._ranks]
            first = self._launch.ranks[0]
            text = ready_text(first.group, told, seconds=seconds, socket_dir=Path(first.socket_dir))
            self._say_unless_ending(text)

    def _say_unless_ending(self, text: str) -> None:
        if not self._ending.begun.is_set():
            self._display.settle()
            self._display.say(text)

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._ending.begun.wait()

    async def _reap_orphans(self) -> None:
        """Reap whom the kernel gives to this process, which may be PID 1 of a container: what a
        killed rank has left, for one."""
        with anyio.open_signal_receiver(signal.SIGCHLD) as signals:
            while True:
                all_seen = reap_orphans([p.pid for p in self._processes() if p.pid is not None])
                with anyio.move_on_after(math.inf if all_seen else REAP_AGAIN):
                    await anext(signals)

    async def _stop_when_ending(self) -> None:
        """SIGTERM to all, and SIGKILL to who is still there after a while or on a second signal."""
        await self._ending.begun.wait()
        for process in self._processes():
            process.terminate()
        with anyio.move_on_after(max(rank.deadlines.stop for rank in self._launch.ranks)):
            await self._ending.hurried.wait()
        for process in self._processes():
            if process.pid is not None:
                self._display.say(f"process {process.pid} still runs: killing it")
                process.kill()

    def _processes(self) -> list[Process]:
        health = self._launch.health
        return [*([health.process] if health else []), *(rank.process for rank in self._ranks)]


_PHASES = ("opening", "loading", "identifying")


def _last_words(status: str) -> str:
    """What a rank that has ended told of itself last, to be said after how it ended."""
    if status.startswith(FAILED):
        return f": {one_line(status.removeprefix(FAILED))}"
    phase = status.partition(" ")[0]
    return f" while {one_line(status)}" if phase in _PHASES else ""


async def _ask(rank: Rank) -> Told:
    return await anyio.to_thread.run_sync(
        partial(told_by, rank.name, rank.socket, timeout=STATUS_TIMEOUT)
    )
