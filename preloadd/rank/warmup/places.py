"""The tables that go with a rank's weights: whose they are, and what disk and stores have of them.

What is in here blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from preloadd.domain.lines import one_line
from preloadd.domain.strict_json import MAX_NBYTES, Malformed, decode
from preloadd.errors import PreloadError
from preloadd.protocol.messages import Warmable
from preloadd.warmup import folder
from preloadd.warmup.names import TableName, is_config_hash
from preloadd.warmup.seeding.kinds import Unfit
from preloadd.warmup.seeding.tables import KIND, TableWanted
from preloadd.warmup.stores.api import Shared
from preloadd.warmup.table import BadTable, Table, parse
from preloadd.warmup.verdict import Metadata, Verdict, compare

_PREFIX = f"vllm-warmup-cache/{KIND}"
_MAX_RANKS = 1 << 12


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Which tables are looked for: `own`, and those of all ranks that are to have theirs too."""

    root: Path
    config_hash: str
    own: TableName
    names: tuple[TableName, ...]
    metadata: Metadata

    @classmethod
    def of(cls, told: Warmable) -> Self:
        """The place that a loader told; ValueError if there is no such."""
        own = TableName(told.dp_rank, told.rank)
        names = tuple(TableName(*each) for each in told.ranks)
        sound = all(TableName.parse(str(name)) == name for name in names)
        if not is_config_hash(told.config_hash) or not Path(told.root).is_absolute():
            raise ValueError(f"no place for tables: {told.config_hash} in {told.root}")
        if not sound or own not in names or len(names) > _MAX_RANKS:
            raise ValueError(f"no ranks of a group: {own} of {len(names)}")
        return cls(Path(told.root), told.config_hash, own, names, told.metadata)

    @property
    def path(self) -> Path:
        """Where the own table is."""
        return self.root / self.config_hash / str(self.own)

    def stored(self, name: TableName) -> bytes | None:
        """What is on the disk of a table; InsecurePath, OSError."""
        return folder.stored(self.root, self.config_hash, name)

    def all_stored(self) -> Mapping[TableName, bytes]:
        """What there is of all of them, in the order of ranks; InsecurePath, OSError."""
        found = {name: self.stored(name) for name in self.names}
        return {name: raw for name, raw in found.items() if raw is not None}

    def wanted(self, name: TableName) -> TableWanted:
        """One of the tables, as a peer is asked for it."""
        return TableWanted(self.config_hash, name, self.metadata)


@dataclass(frozen=True, slots=True)
class Disk:
    """Whether all tables are there and would be used, or what keeps the own one from its place;
    `faults` are of those that could not be read."""

    complete: bool = False
    conflict: str = ""
    faults: tuple[str, ...] = ()


def store_key(config_hash: str, name: TableName) -> str:
    """Under which stores keep a table; vLLM's is the same."""
    return f"{_PREFIX}/{config_hash}/{name}"


def mixed(tables: Collection[Table]) -> str:
    """Why ranks would not use these together; '' if they would.

    vLLM has all ranks tune unless their tables have one fingerprint; and one that is empty is of
    no use to any, nor does it keep from tuning.
    """
    if not all(table.entries for table in tables):
        return "a table is empty"
    if len({table.fingerprint for table in tables}) > 1:
        return "the tables are not of one tuning: ranks differ in entries or metadata"
    return ""


def loadable(raw: bytes) -> bool:
    """Whether it is a table that engines can load."""
    try:
        parse(raw, "")
    except BadTable:
        return False
    return True


def on_disk(place: TablePlace) -> Disk:
    """What is there of a place. What is no table is none, and may be replaced."""
    used: list[Table] = []
    conflict, faults = "", []
    for name in place.names:
        try:
            table = _table(place.stored(name), name)
        except (PreloadError, OSError) as error:
            faults.append(f"{one_line(place.root)}: {error}")
            table = None
        found = None if table is None else compare(table.metadata, place.metadata)
        if table is not None and found is not None and found.verdict is Verdict.EQUAL:
            used.append(table)
        if found is not None and found.verdict is Verdict.HARD and name == place.own:
            conflict = (
                f"{one_line(place.path)} was tuned in another environment ({found}), and is not "
                "overwritten: remove it if no engine uses that any more"
            )
    complete = len(used) == len(place.names) and not mixed(used)
    return Disk(complete, conflict, tuple(faults))


def in_stores(stores: Shared, place: TablePlace) -> Mapping[TableName, Table] | None:
    """All tables of a place, or None; Unfit for one that is not to be used, PreloadError, OSError.

    What a store has is judged as what a peer sends is, and by whether it goes with the tables of
    the ranks before; the stores that follow one that is not of use are asked as well.
    """
    found: dict[TableName, Table] = {}
    for name in place.names:
        judge = _Judge(place.wanted(name), store_key(place.config_hash, name), found)
        if stores.find(judge.key, MAX_NBYTES, judge) is None:
            if judge.why:
                raise Unfit(f"{judge.key}: {judge.why}")
            return None
    return found


class _Judge:
    """Puts the table of a rank among those that were `found` before, if it is fit for that; `why`
    is why the last one was not."""

    def __init__(self, wanted: TableWanted, key: str, found: dict[TableName, Table]) -> None:
        self.key = key
        self.why = ""
        self._wanted = wanted
        self._found = found

    def __call__(self, raw: bytes) -> bool:
        name = self._wanted.name
        try:
            table = self._wanted.judged({str(name): decode(raw)})
        except (Unfit, Malformed) as error:
            self.why = str(error)
            return False
        self.why = mixed([*self._found.values(), table])
        if not self.why:
            self._found[name] = table
        return not self.why


def _table(raw: bytes | None, name: TableName) -> Table | None:
    """A table that an engine can load."""
    try:
        return None if raw is None else parse(raw, str(name))
    except BadTable:
        return None
