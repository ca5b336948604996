"""Tables for the weights of a rank: found on disk, in stores or at a peer, or tuned and shared.

Nothing in here is an error: what cannot be had in time is done without, and told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio import to_thread

from preloadd.domain.lines import one_line
from preloadd.domain.strict_json import MAX_NBYTES
from preloadd.errors import PreloadError
from preloadd.protocol.messages import Tuned, Warmable
from preloadd.rank import record
from preloadd.rank.seeding.api import Fetch
from preloadd.rank.warmup import places
from preloadd.rank.warmup.places import Disk, TablePlace
from preloadd.transport.threads import Threads
from preloadd.warmup import folder
from preloadd.warmup.names import TableName
from preloadd.warmup.seeding.kinds import Outcome
from preloadd.warmup.seeding.tables import TableKind, install_all
from preloadd.warmup.stores.api import Shared
from preloadd.warmup.table import BadTable, Table, parse

log = logging.getLogger(__name__)

DISK_S = 15.0
"""Seconds that reading or installing tables on this host's disks may take."""

STORE_S = 6.0
"""Seconds that warm-up waits for each store, all tables together: little more than a call may take.
"""

PUBLISH_S = 30.0
"""Seconds that each step of publishing may take: nobody waits for it."""

RECORD = "warmup.json"
"""Name of the file beside a rank's socket from which its next life knows where its tables are."""

_SWITCHED_OFF = "tables: not tuned, which is switched off"
_MAX_TOLD = 500

_Set = Mapping[str, bytes]
"""Tables of all ranks, under their keys in stores."""


class _Record(msgspec.Struct, frozen=True):
    """What is kept for the next life: whose weights these are, what their loader told, and how it
    failed to tune."""

    generation: str
    warmable: Warmable
    failure: str = ""


class Tables:
    """What one rank does about tables. Implements `rank.loading.Warm`; `work` beside serving.

    `kind` is what peers may ask for: tables from the disk, else from the stores. `record` is the
    file for its next life. `stores` opens what it shares with other hosts, which it owns then;
    `within` seconds are all there is for a peer in a load. Not `enabled`, nothing is tuned.
    """

    def __init__(
        self,
        record: Path,
        *,
        enabled: bool = True,
        stores: Callable[[], Shared] | None = None,
        fetch: Fetch | None = None,
        within: float = 60.0,
    ) -> None:
        self.kind = TableKind([self.on_disk, self.in_stores])
        self._record = record
        self._enabled = enabled
        self._open = stores
        self._opening = anyio.Lock()
        self._stores: Shared | None = None
        self._fetch = fetch
        self._within = self._patience = within
        self._warmable: Warmable | None = None
        self._line = "" if enabled else _SWITCHED_OFF
        self._failure = ""
        self._bad = self._unsure = False
        self._notes: list[str] = []
        self._published = ""
        self._to_publish: list[_Set] = []
        self._due = anyio.Event()
        self._disk = Threads("the disk")
        self._afar = Threads("a store")

    async def open(self) -> None:
        """Open the stores, unless they are; ConfigError for any that cannot be used."""
        async with self._opening:
            if self._open is not None and self._stores is None:
                self._stores = await to_thread.run_sync(self._open)

    def close(self) -> None:
        """Let go of the stores."""
        if self._stores is not None:
            self._stores.close()

    @property
    def warmable(self) -> Warmable | None:
        """What the loader of the weights told; None before that, and if it told nothing."""
        return self._warmable

    @property
    def patience(self) -> float:
        """Seconds that are left for a peer in this load, whatever it is asked for."""
        return self._patience

    @property
    def stores(self) -> Shared | None:
        """The stores, once they are open."""
        return self._stores

    # -- what a load does --

    async def wanted(self, warmable: Warmable) -> bool:
        """Whether the loader is to tune: it can, and its table is nowhere else to be had."""
        self._begin(warmable)
        if not warmable.tunes:
            if warmable.why_not and self._enabled:
                self._say(f"tables: not tuned: {warmable.why_not}")
            return False
        place = self._place(warmable)
        return place is not None and not await self._found(place)

    async def found(self) -> bool:
        """Whether tables for all ranks are there, or were fetched just now: what a rank asks whose
        loader does not tune, before it has somebody else do it. True as well where none can be put
        in their place."""
        if not self._enabled:
            return True
        warmable = self._warmable
        if warmable is None or not warmable.root:
            return False
        place = self._place(warmable)
        return place is not None and await self._found(place)

    async def made(self, warmable: Warmable, tuned: Tuned) -> None:
        """Tell how tuning ended, and have the stores get what was made."""
        if tuned.failure:
            self._say(f"tables: tuning failed, engines use defaults: {tuned.failure}", good=False)
            self._failure = self._line
            return
        place = TablePlace.of(warmable)
        self._say(f"tables: tuned {tuned.entries:,} entries in {tuned.seconds:.1f} s")
        if self._stores is None:
            return
        found = await self._left(place)
        if found is None:
            return
        if place.own not in found:
            self._note(f"{place.path} is gone again: it was not published")
        elif len(found) == len(place.names):
            await self._share(place, found)
        else:
            self._published = (
                f"tables: {len(found)} of {len(place.names)} ranks have one on this host: the last "
                "to have its own publishes all"
            )

    async def rehearsed(self) -> None:
        """Tell which tables an engine has left, and have the stores get them, all or none."""
        warmable = self._warmable if self._enabled else None
        if warmable is None or not warmable.root or (place := self._place(warmable)) is None:
            return
        found = await self._left(place)
        if found is None:
            return
        if len(found) < len(place.names):
            self._say(
                f"tables: {len(found)} of {len(place.names)} ranks have one after the warm-up"
            )
            return
        self._say(f"tables: tuned by an engine, {one_line(place.path.parent)}")
        if self._stores is not None:
            await self._share(place, found)

    async def _left(self, place: TablePlace) -> Mapping[TableName, bytes] | None:
        """What is on the disk, in the order of ranks; None, and that is told, if that fails."""
        try:
            return await self._disk.run(place.all_stored, within=DISK_S)
        except (PreloadError, OSError) as error:
            self._note(f"not published: {error}")
            return None

    async def _share(self, place: TablePlace, found: Mapping[TableName, bytes]) -> None:
        """Have the stores get these, if they are those of all ranks and go together."""
        if len(found) < len(place.names):
            self._note(f"not published: only {len(found)} of {len(place.names)} ranks have one now")
            return

        def judged() -> str:
            return places.mixed([parse(raw, str(name)) for name, raw in found.items()])

        try:
            why = await self._disk.run(judged, within=DISK_S)
        except (BadTable, OSError) as error:
            why = str(error)
        if why:
            self._note(f"not published: {why}")
            return
        held = {places.store_key(place.config_hash, name): raw for name, raw in found.items()}
        self._to_publish.append(held)
        self._due.set()

    # -- lives --

    def loaded(self, generation: str) -> None:
        """Keep what the loader told for the next life, which adopts its weights."""
        if self._warmable is None or not (self._warmable.root or self._warmable.identity):
            return
        kept = _Record(generation, self._warmable, self._failure)
        record.leave(self._record, msgspec.json.encode(kept))

    def adopted(self, generation: str, *, makes: bool) -> None:
        """Weights of an earlier life are served: its tables are given to others as well, and to the
        stores if loads have some made: by the loader, or where this rank `makes` them."""
        try:
            found = msgspec.json.decode(record.left(self._record) or b"", type=_Record)
        except (OSError, PreloadError, msgspec.MsgspecError, RecursionError):
            return
        if found.generation != generation:
            return
        told = self._warmable = found.warmable
        if told.root and self._enabled and (makes or told.tunes):
            before = f"tables: as before, below {one_line(told.root)}"
            self._line, self._bad = found.failure or before, bool(found.failure)
            self._look_later()

    async def work(self) -> None:
        """Publish what was made, or is there, for as long as the daemon lives."""
        try:
            await self.open()
        except PreloadError as error:
            # Weights that are there already are served all the same.
            self._note(f"shared stores: {error}")
        while True:
            await self._due.wait()
            self._due = anyio.Event()
            if self._unsure and self._warmable is not None:
                self._unsure = False
                await self._look(self._warmable)
            while self._to_publish:
                await self._publish(self._to_publish.pop(0))

    def _look_later(self) -> None:
        self._unsure = True
        self._due.set()

    async def _look(self, warmable: Warmable) -> None:
        """See what is on the disk by now, when nobody waits for that: tell it if it is not what was
        told, and have the first rank give it to the stores, which may have lost it."""
        if (place := self._place(warmable)) is None:
            return
        disk = await self._on_disk(place)
        if self._warmable is not warmable or disk.faults:
            return
        if disk.conflict:
            self._conflicts(disk)
        elif not disk.complete and not self._bad:
            self._say(
                f"tables: not there for all ranks, below {one_line(place.root)}: preloadctl "
                "release and preloadctl load have them made, if there is something to tune"
            )
        if not disk.complete:
            return
        if self._bad:
            self._say(f"tables: found on disk, {one_line(place.path)}")
        if self._stores is None or place.own != place.names[0]:
            return
        found = await self._left(place)
        if found is not None:
            await self._share(place, found)

    # -- what others hear --

    def tables_of(self, config_hash: str) -> Mapping[str, bytes]:
        """All tables of a configuration that engines can load, as files; for those that look for
        them elsewhere. Blocking."""
        told = self._warmable
        if told is None or told.config_hash != config_hash:
            return {}
        names = [TableName(*each) for each in told.ranks]
        found = {str(name): self._sound(config_hash, name) for name in names}
        return {name: raw for name, raw in found.items() if raw is not None}

    def told(self) -> tuple[str, ...]:
        """Lines for people: how warm-up ended, and what was not as it should be."""
        faults = () if self._stores is None else self._stores.faults
        stores = [f"store {one_line(fault)}"[:_MAX_TOLD] for fault in faults]
        return tuple(filter(None, (self._line, *self._notes, self._published, *stores)))

    def troubles(self) -> tuple[str, ...]:
        """Those of them for which somebody has to do something."""
        return (self._line,) if self._bad else ()

    def on_disk(self, config_hash: str, name: TableName) -> bytes | None:
        """The table below the root that the loader told. Blocking; InsecurePath, OSError."""
        if self._warmable is None or not self._warmable.root:
            return None
        return folder.stored(Path(self._warmable.root), config_hash, name)

    def in_stores(self, config_hash: str, name: TableName) -> bytes | None:
        """The table in the first store that has it. Blocking; PreloadError, OSError."""
        if self._stores is None:
            return None
        return self._stores.find(places.store_key(config_hash, name), MAX_NBYTES, places.loadable)

    # -- tiers --

    def _place(self, warmable: Warmable) -> TablePlace | None:
        try:
            return TablePlace.of(warmable)
        except (ValueError, TypeError) as error:
            self._say(f"tables: not tuned: the loader told {error}")
            return None

    def _sound(self, config_hash: str, name: TableName) -> bytes | None:
        for find in (self.on_disk, self.in_stores):
            try:
                raw = find(config_hash, name)
                if raw is not None:
                    parse(raw, str(name))
                    return raw
            except (PreloadError, OSError) as error:
                log.warning("a table is not given to engines: %s", one_line(error))
        return None

    async def _found(self, place: TablePlace) -> bool:
        """Whether nothing is to be tuned, since tables are there, were fetched, or cannot be put
        there."""
        disk = await self._on_disk(place)
        if disk.conflict:
            self._conflicts(disk)
            return True
        if disk.complete:
            self._say(f"tables: found on disk, {one_line(place.path)}")
            self._look_later()
            return True
        for where, find in (("a shared store", self._of_stores), ("a peer", self._of_peer)):
            found = await find(place)
            if found and await self._installed(place, found, where):
                return True
        return False

    async def _on_disk(self, place: TablePlace) -> Disk:
        """What the disk has of a place; its faults are told."""
        try:
            disk = await self._disk.run(partial(places.on_disk, place), within=DISK_S)
        except OSError as error:
            disk = Disk(faults=(f"{place.path.parent}: {error}",))
        for fault in disk.faults:
            self._note(fault)
        return disk

    async def _of_stores(self, place: TablePlace) -> Mapping[TableName, Table] | None:
        """All tables out of the stores, or None."""
        stores = self._stores
        if stores is None:
            return None
        within = STORE_S * len(stores.names)
        try:
            return await self._afar.run(partial(places.in_stores, stores, place), within=within)
        except (PreloadError, OSError) as error:
            self._note(f"shared stores: {error}")
        return None

    async def _of_peer(self, place: TablePlace) -> Mapping[TableName, Table] | None:
        """All tables of one peer, or None: those of several sweeps are not to be mixed."""
        if self._fetch is None:
            return None
        found: dict[TableName, Table] = {}
        until = anyio.current_time() + self._patience
        for name in place.names:
            if not self._patience:
                self._note(f"not seeded: no time was left to ask for {name}")
                return None
            seeded = await self._fetch(place.wanted(name), within=self._patience)
            self._patience = max(until - anyio.current_time(), 0.0)
            if seeded.value is None:
                self._note(f"not seeded ({seeded.outcome}): {seeded.why}")
                return None
            found[name] = seeded.value
        if why := places.mixed(found.values()):
            self._note(f"not seeded ({Outcome.INCOMPATIBLE}): {why}")
            return None
        return found

    async def _installed(
        self, place: TablePlace, found: Mapping[TableName, Table], where: str
    ) -> bool:
        try:
            install = partial(install_all, place.root, place.config_hash, found)
            seeded = await self._disk.run(install, within=DISK_S)
        except (PreloadError, OSError) as error:
            self._note(f"what {where} has cannot be installed: {error}")
            return False
        if seeded.outcome is not Outcome.INSTALLED:
            self._note(f"what {where} has cannot be installed: {seeded.why}")
            return False
        self._say(f"tables: installed from {where}, {one_line(place.path)}")
        return True

    async def _publish(self, held: _Set) -> None:
        """All of them, unless the first is there already, and another: whoever was first has its
        own there or is about to, and ranks are not to get some of each."""
        if self._stores is None:
            return
        first = next(iter(held))
        try:
            for key, value in held.items():
                await self._afar.run(
                    partial(self._stores.keep, key, value, places.loadable), within=PUBLISH_S
                )
                if key == first and not await self._is_ours(key, value):
                    return
        except (PreloadError, OSError) as error:
            self._note(f"not published: {error}")
        else:
            # Those that failed say so themselves.
            self._published = (
                "" if self._stores.faults else "tables: published to the shared stores"
            )

    async def _is_ours(self, key: str, value: bytes) -> bool:
        if self._stores is None:
            return False
        find = partial(self._stores.find, key, MAX_NBYTES, places.loadable)
        there = await self._afar.run(find, within=PUBLISH_S)
        if there is not None and there != value:
            self._note(f"not published: a store has other tables already, which stay there: {key}")
        elif there is None and not self._stores.faults:
            self._note(f"not published: no store has kept {key}")
        return there == value

    # -- telling --

    def _begin(self, warmable: Warmable) -> None:
        self._warmable, self._notes, self._published = warmable, [], ""
        self._line, self._bad = "" if self._enabled else _SWITCHED_OFF, False
        self._failure, self._patience, self._unsure = "", self._within, False

    def _conflicts(self, disk: Disk) -> None:
        self._say(f"tables: not tuned: {disk.conflict}", good=False)

    def _say(self, line: str, *, good: bool = True) -> None:
        self._line, self._bad = one_line(line)[:_MAX_TOLD], not good
        log.log(logging.INFO if good else logging.WARNING, "%s", self._line)

    def _note(self, text: str) -> None:
        note = f"tables: {one_line(text)}"[:_MAX_TOLD]
        if note not in self._notes:
            self._notes.append(note)
            log.warning("%s", note)
