"""The key: the fingerprint by which an engine and a generation are matched.

A key is a flat mapping of field name to text, so that builders can add fields of their own: a field
that only one side has is a mismatch. The engine need not know the digest of its checkpoint: where
its files are the very files the loader read, nothing has to be read (see `differences`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NewType

from preloadd.domain.files import FileIdentity

Key = NewType("Key", dict[str, str])
"""Field name to canonical text."""

CHECKPOINT = "checkpoint"
"""The field that names the content: `<method>:<hex digest>`; empty where it was not read."""

OWN_PLACE = frozenset({"tp_rank", "pp_rank", "dp_rank", "ep_rank"})
"""The fields that tell a rank from the others of its group. All agree in all other fields."""

MAX_VALUE = 2048
"""Characters of a field's value that travel as they are."""

MAX_TABLE = 8192
"""Characters of a field that is a table of many settings."""

MAX_ENTRIES = 256
"""Entries of a table, or of one in it, that are told one by one."""

MAX_ENTRY = 160
"""Characters of one entry's value that travel as they are."""

ABSENT = "(absent)"
"""What a difference shows for the side that lacks the field."""

_MAX_TOLD = 8
"""Entries of one table that are told to differ, before the rest is counted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two keys (or recipes) differ, with both values; of a field that is a table
    on both sides, one entry, named by dots: `model_config.sliding_window`."""

    field: str
    daemon: str
    engine: str


def canonical(value: object) -> str:
    """`value` as text that is equal when two values of one field mean the same, and only then.

    Strings stand as they are, so a field is either always a string or never. Anything else is JSON
    with sorted keys, in which a float of integral value is written as an integer (10000.0 equals
    10000).
    """
    if isinstance(value, str):
        return value
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def bounded(text: str, limit: int = MAX_VALUE) -> str:
    """`text`, or a digest of it where it would crowd everything else out of a packet."""
    if len(text) <= limit:
        return text
    return f"blake2b:{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


def table(settings: Mapping[str, object]) -> str:
    """Many settings as one field, whose entries are compared and told one by one.

    What is long in it is told by a digest; and so is all of it, should it still be too much.
    """
    return bounded(canonical(_brief(settings)), MAX_TABLE)


def _brief(value: object) -> object:
    if isinstance(value, Mapping) and len(value) <= MAX_ENTRIES:
        return {str(name): _brief(inner) for name, inner in value.items()}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = canonical(value)
    return value if len(text) <= MAX_ENTRY else bounded(text, 0)


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(inner) for inner in value), key=repr)
    return value


def digest_method(checkpoint: str) -> str:
    """The method by which the text of a CHECKPOINT field was made; empty for an unread one."""
    return checkpoint.partition(":")[0]


def differences(
    daemon: Mapping[str, str],
    engine: Mapping[str, str],
    *,
    daemon_files: Sequence[FileIdentity] = (),
    engine_files: Sequence[FileIdentity] = (),
) -> tuple[Difference, ...]:
    """The fields in which the keys differ, sorted by name; empty when the engine may attach.

    Equal, non-empty sets of file identities stand for equal checkpoint content. They are compared
    as sets: names and order of shards do not matter.
    """
    same_files = bool(daemon_files) and set(daemon_files) == set(engine_files)
    found: list[Difference] = []
    for field in sorted(daemon.keys() | engine.keys()):
        theirs, ours = daemon.get(field, ABSENT), engine.get(field, ABSENT)
        if theirs == ours and not (field == CHECKPOINT and not ours):
            continue
        if field == CHECKPOINT and same_files:
            continue
        found += _told(field, theirs, ours)
    return tuple(found)


def _told(field: str, daemon: str, engine: str) -> Iterator[Difference]:
    """The difference of one field; of two tables the entries that differ, as many as one reads."""
    apart: list[Difference] = []
    if _is_table(daemon) and _is_table(engine):
        with suppress(ValueError, RecursionError):
            apart = list(_apart(field, json.loads(daemon), json.loads(engine)))
    yield from apart[:_MAX_TOLD] or [Difference(field, daemon, engine)]
    if (more := len(apart) - _MAX_TOLD) > 0:
        yield Difference(f"{field}.*", f"{more} more entries", "other ones")


def _is_table(text: str) -> bool:
    # Nothing that `canonical` wrote has an escaped surrogate, which could not be sent on as text.
    return text.startswith("{") and "\\ud" not in text.lower()


def _apart(
    field: str, daemon: Mapping[str, object], engine: Mapping[str, object]
) -> Iterator[Difference]:
    for name in sorted(daemon.keys() | engine.keys()):
        theirs, ours = daemon.get(name, ABSENT), engine.get(name, ABSENT)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            yield from _apart(f"{field}.{name}", theirs, ours)
        elif (told := canonical(theirs)) != (wanted := canonical(ours)):
            yield Difference(f"{field}.{name}", told, wanted)
