"""Keeps looking at every rank, so that whoever wants to know waits for none of them.

Each rank has a task of its own that asks it over one connection, again and again. A rank that does
not answer is waited for there: a further connection would only queue behind the first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from preloadd.domain.ids import Instance
from preloadd.errors import AccessDenied, PreloadError, Unavailable
from preloadd.protocol.messages import Reason, StatusTold
from preloadd.supervisor.devices import Device, Sample
from preloadd.supervisor.history import KEPT, Happening, happenings
from preloadd.supervisor.line import Line
from preloadd.supervisor.roster import Expected, Wanted, socket_path
from preloadd.supervisor.snapshots import Record
from preloadd.supervisor.verdict import Contact, Snapshot, Unit, complaint

log = logging.getLogger(__name__)

Units = Callable[[Sequence[str]], Mapping[str, Unit]]
"""What the service manager says of services, by name; blocks for a moment, and never raises."""


@dataclass(frozen=True, slots=True)
class View:
    """Everything that is known now. Happenings are newest first."""

    at: datetime
    ranks: tuple[Snapshot, ...] = ()
    happenings: tuple[Happening, ...] = ()
    devices: tuple[Device, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between questions, until an answer is overdue, between looks at everything else."""

    ask: float = 0.5
    overdue: float = 2.0
    refused: float = 10.0
    surroundings: float = 2.0


class Lookout:
    """Watches ranks below `socket_dir`: `watch` for ever, `look` at any time."""

    def __init__(
        self,
        socket_dir: Path,
        roster: Callable[[], Wanted],
        *,
        pace: Pace | None = None,
        units: Units | None = None,
        samples: Sequence[Sample] = (),
    ) -> None:
        self._socket_dir = socket_dir
        self._roster = roster
        self._pace = pace or Pace()
        self._ask_manager = units
        self._samples = samples
        self._posts: dict[Expected, _Post] = {}
        self._wanted = Wanted(())
        self._units: Mapping[str, Unit] = {}
        self._devices: tuple[Device, ...] = ()
        self._happenings: deque[Happening] = deque(maxlen=KEPT)
        self._told: dict[Instance, Snapshot] = {}
        self._begun = anyio.Event()

    async def look(self) -> View:
        """What is known now. Waits only in the beginning, until every rank was asked once."""
        await self._begun.wait()
        return self._view()

    async def watch(self) -> None:
        """Look, until cancelled."""
        async with anyio.create_task_group() as tasks:
            await self._look_around(tasks)
            for post in self._posts.values():
                await post.known.wait()
            self._begun.set()
            while True:
                await anyio.sleep(self._pace.surroundings)
                await self._look_around(tasks)

    def _view(self) -> View:
        now = anyio.current_time()
        return View(
            datetime.now(UTC),
            tuple(self._snapshot(rank, now) for rank in self._wanted.ranks),
            tuple(reversed(self._happenings)),
            self._devices,
            self._wanted.trouble,
        )

    def _snapshot(self, rank: Expected, now: float) -> Snapshot:
        return self._posts[rank].record.snapshot(now=now, unit=self._units.get(rank.unit))

    async def _look_around(self, tasks: TaskGroup) -> None:
        """Find out which ranks there are to watch, and what others say of them."""
        wanted, units, devices = await anyio.to_thread.run_sync(self._survey)
        self._units, self._devices = units, devices
        for rank in set(self._posts) - set(wanted.ranks):
            self._posts.pop(rank).scope.cancel()
            self._told.pop(rank.instance, None)
        for rank in wanted.ranks:
            if rank not in self._posts:
                path = socket_path(self._socket_dir, rank.instance)
                post = self._posts[rank] = _Post(rank, path, self._pace, self._note)
                tasks.start_soon(post.watch)
        self._wanted = wanted
        for rank in wanted.ranks:
            if self._posts[rank].known.is_set():
                self._note(rank)

    def _survey(self) -> tuple[Wanted, Mapping[str, Unit], tuple[Device, ...]]:
        """Blocks, for files and for the service manager."""
        wanted = self._roster()
        units = self._ask_manager([rank.unit for rank in wanted.ranks]) if self._ask_manager else {}
        devices = tuple(device for sample in self._samples for device in sample())
        return wanted, units, devices

    def _note(self, rank: Expected) -> None:
        """Keep what has happened to a rank since it was last looked at."""
        post = self._posts.get(rank)
        if post is None:
            return
        now = self._snapshot(rank, anyio.current_time())
        before = self._told.get(rank.instance)
        self._told[rank.instance] = now
        self._happenings.extend(happenings(before, now, at=datetime.now(UTC).timestamp()))
        if before is None or before.condition != now.condition:
            level = logging.WARNING if complaint(now) else logging.INFO
            log.log(level, "%s: %s", now.name, complaint(now) or now.condition)


class _Post:
    """Where one rank is watched from. `noted` is called whenever its record has changed."""

    def __init__(
        self, rank: Expected, path: Path, pace: Pace, noted: Callable[[Expected], None]
    ) -> None:
        self.record = Record(rank)
        self.known = anyio.Event()
        self.scope = anyio.CancelScope()
        self._rank = rank
        self._path = path
        self._pace = pace
        self._noted = noted

    async def watch(self) -> None:
        """Ask for ever; connect again whenever the rank has gone."""
        with self.scope:
            while True:
                try:
                    await self._converse()
                except AccessDenied as error:
                    self._lost(Contact.FAULTY, error)
                    # It logs every client that it turns away.
                    await anyio.sleep(self._pace.refused)
                except Unavailable as error:
                    busy = error.reason == Reason.BUSY
                    self._lost(Contact.STUCK if busy else Contact.ABSENT, error)
                except PreloadError as error:
                    self._lost(Contact.FAULTY, error)
                await anyio.sleep(self._pace.ask)

    async def _converse(self) -> None:
        """Ask over one connection, as long as there are answers."""
        with Line.open(self._path) as line:
            while True:
                told = await self._ask(line)
                wall = datetime.now(UTC).timestamp()
                self.record.answered(told, now=anyio.current_time(), wall=wall)
                self._note()
                await anyio.sleep(self._pace.ask)

    async def _ask(self, line: Line) -> StatusTold:
        self.record.asked(now=anyio.current_time())
        await line.ask()
        with anyio.move_on_after(self._pace.overdue):
            return await line.answer()
        self.record.silent()
        self._note()
        return await line.answer()

    def _lost(self, contact: Contact, error: PreloadError) -> None:
        self.record.lost(contact, str(error))
        self._note()

    def _note(self) -> None:
        self.known.set()
        self._noted(self._rank)
