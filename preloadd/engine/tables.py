"""FlashInfer's tables that a daemon has for an engine: judged as FlashInfer itself does, installed.

All ranks of a group have tables from one tuning, or none: with those of several, ranks of one
engine could pick kernels that wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from preloadd.domain.strict_json import MAX_NBYTES
from preloadd.errors import ErrorCode, PreloadError
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import TableName
from preloadd.warmup.table import Table, parse

LIMIT = MAX_NBYTES
"""Bytes of one table."""

Unused = Callable[[Mapping[str, str | None]], Sequence[str]]
"""The fields of metadata for which FlashInfer would not use a table here; none if it would."""


class UnfitTables(PreloadError):
    """What the daemon has is not to be used here; the text says why."""

    code: ClassVar[ErrorCode] = ErrorCode.MISMATCH


def install(
    received: Mapping[str, bytes],
    wanted: Sequence[TableName],
    root: Path,
    config_hash: str,
    unused: Unused,
) -> str:
    """Put the tables of all ranks where engines look for them; what was done, for people.

    Nothing is changed where tables are that engines use already. BadTable, UnfitTables,
    TableConflict (those there are of another environment), InsecurePath, OSError: nothing was
    changed either.
    """
    new = {name: _fit(received, name, unused) for name in wanted}
    if len({table.fingerprint for table in new.values()}) > 1:
        raise UnfitTables("its tables are not of one tuning: ranks differ in entries or metadata")
    if _there(root, config_hash, wanted, unused):
        return f"tables of FlashInfer are there already, in {root / config_hash}"
    folder.install(root, config_hash, new, Existing.REPLACE)
    return f"{len(new)} tables of FlashInfer from the daemon, in {root / config_hash}"


def _fit(received: Mapping[str, bytes], name: TableName, unused: Unused) -> Table:
    raw = received.get(str(name))
    if raw is None:
        raise UnfitTables(f"it has {len(received)} tables, and not that of rank {name.rank}")
    table = parse(raw, str(name))
    if not table.entries:
        raise UnfitTables(f"{name} is empty: it has no entry")
    if table.intact is False:
        raise UnfitTables(f"{name} is not as it was tuned: its digest is that of something else")
    if fields := _unused(table, unused):
        raise UnfitTables(f"{name} was tuned in another environment: {', '.join(fields)}")
    return table


def _there(root: Path, config_hash: str, wanted: Sequence[TableName], unused: Unused) -> bool:
    """Whether all ranks have tables that they use, of one tuning."""
    found: dict[TableName, Table] = {}
    with suppress(FileNotFoundError):
        for one in folder.tables(root, config_hash):
            if one.table is not None and one.table.entries and not _unused(one.table, unused):
                found[one.name] = one.table
    used = [found[name].fingerprint for name in wanted if name in found]
    return len(used) == len(wanted) and len(set(used)) == 1


def _unused(table: Table, unused: Unused) -> Sequence[str]:
    """Of a table without metadata, FlashInfer asks nothing."""
    return () if table.metadata is None else unused(table.metadata)
