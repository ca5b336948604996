"""Two tables of one place made one, and what may be put in whose place."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from preloadd.domain.lines import one_line
from preloadd.errors import ErrorCode, PreloadError
from preloadd.warmup.table import Table
from preloadd.warmup.verdict import FIELDS, Comparison, Verdict, compare


class Existing(StrEnum):
    """What is to become of a table that is there already."""

    KEEP = "keep"
    MERGE = "merge"
    REPLACE = "replace"


class TableConflict(PreloadError):
    """A table is there that is not to be replaced; the text names the file, and why."""

    code: ClassVar[ErrorCode] = ErrorCode.MISMATCH


def merge(old: Table, new: Table) -> Table:
    """Entries of both; `new` wins. Metadata stay those of `old`, as when FlashInfer saves.

    If `old` does not know where it was tuned, that is `new` alone. Never of a hard conflict:
    ask `compare` first.
    """
    found = _compared(old, new)
    if found.verdict is Verdict.HARD:
        raise ValueError(f"tables of different environments: {found}")
    if found.verdict is Verdict.SOFT:
        return new
    records = {**(old.records or {}), **(new.records or {})}
    metadata = new.metadata if old.metadata is None else old.metadata
    return Table({**old.entries, **new.entries}, metadata, records or None)


def settle(old: Table, new: Table, existing: Existing, source: str) -> Table:
    """What is to stand where `old` does, which is called `source`: `old` itself if both are equal.

    TableConflict if `old` is to be kept, and always where it is another environment's; never if it
    does not know where it was tuned, for then no engine uses it.
    """
    found = _compared(old, new)
    name = one_line(source)
    if found.verdict is Verdict.HARD:
        raise TableConflict(
            f"{name} was tuned in another environment ({found}), and nothing was changed: remove "
            "it if no engine uses that any more, or choose another folder"
        )
    if _same(old, new):
        return old
    if existing is Existing.REPLACE or found.verdict is Verdict.SOFT:
        return new
    if existing is Existing.MERGE:
        return merge(old, new)
    raise TableConflict(
        f"{name} is there already, and nothing was changed: --merge adds to it, --replace puts the "
        "new one in its place"
    )


def _compared(old: Table, new: Table) -> Comparison:
    """By the fields that FlashInfer has: somebody's remarks beside them decide nothing."""
    known = None if new.metadata is None else {f: new.metadata.get(f) for f in FIELDS}
    return compare(old.metadata, known)


def _same(old: Table, new: Table) -> bool:
    return (old.entries, old.metadata, old.records) == (new.entries, new.metadata, new.records)
