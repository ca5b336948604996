"""FlashInfer's tables as a kind: `flashinfer_autotune`, a rank's table of one configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from preloadd.domain.lines import one_line
from preloadd.errors import InsecurePath, PreloadError, ProtocolViolation
from preloadd.warmup.folder import install
from preloadd.warmup.merge import Existing, TableConflict
from preloadd.warmup.names import TableName, is_config_hash
from preloadd.warmup.seeding.kinds import Outcome, Seeded, Unfit
from preloadd.warmup.seeding.messages import INVALID_HASH
from preloadd.warmup.table import BadTable, Table, from_json, parse, written
from preloadd.warmup.verdict import ANY, FIELDS, Metadata, Verdict, compare

log = logging.getLogger(__name__)

KIND = "flashinfer_autotune"

Find = Callable[[str, TableName], bytes | None]
"""A tier: the table of a configuration's rank as it is stored there; None if it is not."""

_HASH, _DP_RANK, _RANK = "config_hash", "dp_rank", "rank"
_MAX_TOLD = 64


class TableKind:
    """Answers with the first table of `tiers`, in their order, that an engine can load."""

    def __init__(self, tiers: Sequence[Find]) -> None:
        self._tiers = tuple(tiers)
        self._told: set[str] = set()

    @property
    def name(self) -> str:
        """As requests name it."""
        return KIND

    def resolve(self, fields: Mapping[str, object]) -> bytes | None:
        """The payload, as of any kind: file name and table. A tier that fails is passed over."""
        config_hash, name = _place(fields)
        for tier in self._tiers:
            raw = self._sound(tier, config_hash, name)
            if raw is not None:
                # As it is stored, to the byte: its digest stays that of who tuned it.
                return b"{" + json.dumps(str(name)).encode("ascii") + b": " + raw + b"}"
        return None

    def _sound(self, tier: Find, config_hash: str, name: TableName) -> bytes | None:
        try:
            raw = tier(config_hash, name)
            if raw is not None:
                parse(raw, f"{config_hash}/{name}")
        except (PreloadError, OSError) as error:
            self._tell(one_line(error))
            return None
        return raw

    def _tell(self, fault: str) -> None:
        """Once, however often it is asked for; only peers with a token get that far."""
        if fault not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(fault)
            log.warning("a table is not given to others: %s", fault)


@dataclass(frozen=True, slots=True)
class TableWanted:
    """The table of one rank, to be used where the metadata are `here`."""

    config_hash: str
    name: TableName
    here: Metadata

    kind: ClassVar[str] = KIND

    @property
    def fields(self) -> Mapping[str, object]:
        """What names it, in a request."""
        return {_HASH: self.config_hash, _DP_RANK: self.name.dp_rank, _RANK: self.name.rank}

    def judged(self, payload: object) -> Table:
        """The table in `payload`, which an engine loads without raising, and uses; else Unfit."""
        if not isinstance(payload, dict) or list(payload) != [str(self.name)]:
            raise Unfit(f"it is not the one table {self.name} that was asked for")
        try:
            table = from_json(payload[str(self.name)], str(self.name))
            written(table, str(self.name))
        except BadTable as error:
            raise Unfit(error.why) from None
        if table.intact is False:
            raise Unfit("it is not as it was tuned: its digest is that of something else")
        self._check_place(table.metadata)
        return table

    def _check_place(self, saved: Metadata | None) -> None:
        """More than FlashInfer asks: from elsewhere, a table has to say where it was tuned."""
        if saved is None:
            raise Unfit("it does not say where it was tuned")
        anywhere = [name for name in FIELDS if saved.get(name) == ANY]
        if anywhere:
            raise Unfit(f"it claims to fit any {', '.join(anywhere)}")
        found = compare(saved, self.here)
        if found.verdict is not Verdict.EQUAL:
            raise Unfit(f"it was tuned in another environment: {found}")


def install_all(root: Path, config_hash: str, tables: Mapping[TableName, Table]) -> Seeded[Table]:
    """Install what was fetched for one configuration, all or none, in the place of what was there.

    Of ranks of one group nothing is to be merged: were entries of one left over, their tables
    would differ, and all would tune at every start. OSError if it cannot be written.
    """
    try:
        install(root, config_hash, tables, Existing.REPLACE)
    except (BadTable, TableConflict, InsecurePath) as error:
        return Seeded(Outcome.INCOMPATIBLE, str(error))
    return Seeded(Outcome.INSTALLED)


def _place(fields: Mapping[str, object]) -> tuple[str, TableName]:
    config_hash = fields.get(_HASH)
    if not isinstance(config_hash, str) or not is_config_hash(config_hash):
        raise ProtocolViolation(INVALID_HASH)
    name = TableName(_number(fields, _DP_RANK), _number(fields, _RANK))
    if TableName.parse(str(name)) != name:
        raise ProtocolViolation("no table has such ranks")
    return config_hash, name


def _number(fields: Mapping[str, object], name: str) -> int:
    found = fields.get(name)
    if type(found) is not int:
        raise ProtocolViolation(f"{name} is no integer")
    return found
