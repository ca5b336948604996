"""Keeps looking at every rank, so that whoever wants to know waits for none of them.

Each rank has a task of its own that asks it over one connection, again and again. A rank that does
not answer is waited for there: a further connection would only queue behind the first.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
from anyio.abc import TaskGroup

from preloadd.domain.ids import Instance
from preloadd.domain.lifecycle import State
from preloadd.domain.lines import one_line
from preloadd.errors import AccessDenied, PreloadError, Unavailable
from preloadd.protocol.messages import Reason, StatusTold
from preloadd.supervisor.devices import Device, Sample
from preloadd.supervisor.history import KEPT, Happening, History
from preloadd.supervisor.line import HIDDEN, Line
from preloadd.supervisor.nodes import Peer
from preloadd.supervisor.peers import Peers
from preloadd.supervisor.roster import Expected, Wanted, socket_path
from preloadd.supervisor.snapshots import Record
from preloadd.supervisor.sources import Source
from preloadd.supervisor.verdict import Contact, Snapshot, Unit, complaint
from preloadd.transport.accepting import Episode

log = logging.getLogger(__name__)

_FAILED = PreloadError("this supervisor failed to ask it: its log says why")

_UNAVAILABLE: Mapping[str, Contact] = MappingProxyType(
    {
        Reason.BUSY: Contact.STUCK,
        Reason.STARTING: Contact.STARTING,
        HIDDEN: Contact.FAULTY,
    }
)
"""What has been met where there was no answer; all else is that nobody is there."""

_NO_UNITS: Mapping[str, Unit] = MappingProxyType({})

Units = Callable[[Sequence[str]], Mapping[str, Unit]]
"""What the service manager says of services, by name; blocks. PreloadError if it does not say."""


@dataclass(frozen=True, slots=True)
class View:
    """Everything that is known now. Happenings are newest first.

    `trouble` is the configuration's; `silent` has a line for each other source that tells nothing.
    `peers` are other nodes, which decide nothing here.
    """

    at: datetime
    ranks: tuple[Snapshot, ...] = ()
    happenings: tuple[Happening, ...] = ()
    devices: tuple[Device, ...] = ()
    trouble: str = ""
    silent: tuple[str, ...] = ()
    peers: tuple[Peer, ...] = ()

    @property
    def troubles(self) -> str:
        """All that is wrong with what the supervisor itself needs, by lines."""
        return "\n".join(line for line in (self.trouble, *self.silent) if line)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between questions to a rank, until its answer is overdue, after a refusal; between
    looks at everything else, and until those are overdue: systemctl has a deadline of its own.
    Ranks that are absent from the first look on have that `patience` too, before a warning."""

    ask: float = 0.5
    overdue: float = 2.0
    refused: float = 10.0
    surroundings: float = 2.0
    patience: float = 5.0


class Lookout:
    """Watches ranks below `socket_dir`, and `peers`: `watch` for ever, `look` at any time.

    `roster`, `units` and `samples` (by name) may block for as long as they like: then what they
    told last still holds, and whoever looks is told so.
    """

    def __init__(
        self,
        socket_dir: Path,
        roster: Callable[[], Wanted],
        *,
        pace: Pace | None = None,
        units: Units | None = None,
        samples: Mapping[str, Sample] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._socket_dir = socket_dir
        self._pace = pace or Pace()
        self._roster = Source("the configuration", roster, Wanted(()))
        self._units = Source("systemd", partial(self._ask_manager, units), _NO_UNITS)
        self._devices: list[Source[Sequence[Device]]] = [
            Source(name, sample, ()) for name, sample in (samples or {}).items()
        ]
        self._peers = peers
        self._posts: dict[Expected, _Post] = {}
        self._ranks: dict[Expected, None] = {}
        self._happenings: deque[Happening] = deque(maxlen=KEPT)
        self._histories: dict[Instance, History] = {}
        self._begun = anyio.Event()

    async def look(self) -> View:
        """What is known now. Waits only in the beginning, until every rank was asked once."""
        await self._begun.wait()
        return self._view()

    async def watch(self) -> None:
        """Look, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for devices in self._devices:
                tasks.start_soon(self._keep_asking, devices)
            if self._peers is not None:
                tasks.start_soon(self._peers.watch)
            tasks.start_soon(self._keep_asking, self._roster, partial(self._follow, tasks))
            await self._roster.known.wait()
            tasks.start_soon(self._keep_asking, self._units, self._note_all)
            await self._units.known.wait()
            self._begun.set()

    def _view(self) -> View:
        now = anyio.current_time()
        return View(
            datetime.now(UTC),
            tuple(self._snapshot(rank, now) for rank in self._ranks),
            tuple(reversed(self._happenings)),
            tuple(device for source in self._devices for device in source.value),
            self._roster.trouble or self._roster.value.trouble,
            tuple(trouble for trouble in self._troubles() if trouble),
            () if self._peers is None else self._peers.seen(),
        )

    def _troubles(self) -> Iterator[str]:
        yield self._units.trouble
        yield from (source.trouble for source in self._devices)

    def _snapshot(self, rank: Expected, now: float) -> Snapshot:
        return self._posts[rank].record.snapshot(now=now, unit=self._units.value.get(rank.unit))

    async def _keep_asking(
        self, source: Source[Any], heard: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        pace = self._pace
        await source.watch(heard, pause=pace.surroundings, overdue=pace.patience)

    def _ask_manager(self, units: Units | None) -> Mapping[str, Unit]:
        return units([rank.unit for rank in self._ranks]) if units is not None else _NO_UNITS

    async def _follow(self, tasks: TaskGroup) -> None:
        """Watch the ranks that are wanted now. None is shown before it was looked at."""
        wanted = self._roster.value.ranks
        new = [rank for rank in wanted if rank not in self._posts]
        for rank in new:
            path = socket_path(self._socket_dir, rank.instance)
            post = self._posts[rank] = _Post(rank, path, self._pace, self._note)
            tasks.start_soon(post.watch)
        for rank in new:
            await self._posts[rank].known.wait()
        self._ranks = dict.fromkeys(wanted)
        for rank in set(self._posts) - set(wanted):
            self._posts.pop(rank).scope.cancel()
        for instance in set(self._histories) - {rank.instance for rank in wanted}:
            del self._histories[instance]
        await self._note_all()

    async def _note_all(self) -> None:
        for rank in self._ranks:
            self._note(rank)

    def _note(self, rank: Expected) -> None:
        """Keep what has happened to a rank since it was last looked at."""
        if rank not in self._ranks:
            return
        time, post = anyio.current_time(), self._posts[rank]
        now = self._snapshot(rank, time)
        history = self._histories.setdefault(rank.instance, History())
        if now.standing != history.standing:
            # Who looks for the first time may have come before ranks that are being started.
            early = history.standing is None and now.condition == Contact.ABSENT
            post.missed_at = time + self._pace.patience if early else math.inf
            # A rank that loads for the first time does not listen for as long.
            calm = early or not complaint(now) or now.condition == State.STARTING
            level = logging.INFO if calm else logging.WARNING
            log.log(level, "%s: %s", now.name, complaint(now) or now.condition)
        elif time >= post.missed_at:
            post.missed_at = math.inf
            log.warning("%s: %s", now.name, complaint(now))
        self._happenings.extend(history.add(now, at=datetime.now(UTC).timestamp()))


class _Post:
    """Where one rank is watched from. `noted` is called whenever its record has changed.

    `missed_at` is when to warn of a rank that has been absent from the first look on.
    """

    def __init__(
        self, rank: Expected, path: Path, pace: Pace, noted: Callable[[Expected], None]
    ) -> None:
        self.record = Record(rank)
        self.known = anyio.Event()
        self.scope = anyio.CancelScope()
        self.missed_at = math.inf
        self._rank = rank
        self._path = path
        self._pace = pace
        self._noted = noted
        self._failing = Episode()

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
                    self._lost(_UNAVAILABLE.get(error.reason, Contact.ABSENT), error)
                except PreloadError as error:
                    self._lost(Contact.FAULTY, error)
                except Exception:
                    # Whatever a rank may find to upset this program must not end it.
                    if self._failing.begins():
                        log.exception("%s: not asked", self._rank.instance)
                    self._lost(Contact.FAULTY, _FAILED)
                    await anyio.sleep(self._pace.refused)
                await anyio.sleep(self._pace.ask)

    async def _converse(self) -> None:
        """Ask over one connection, as long as there are answers, and engines could ask as well."""
        with await Line.open(self._path) as line:
            while line.is_found:
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
        self.record.lost(contact, one_line(error))
        self._note()

    def _note(self) -> None:
        self.known.set()
        self._noted(self._rank)
