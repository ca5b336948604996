"""The key: the fingerprint by which an engine and a generation are matched.

A key is a flat mapping of field name to text, so that builders can add fields of their own: a field
that only one side has is a mismatch. The engine need not know the digest of its checkpoint: where
its files are the very files the loader read, nothing has to be read (see `differences`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

from preloadd.domain.files import FileIdentity

Key = NewType("Key", dict[str, str])
"""Field name to canonical text."""

CHECKPOINT = "checkpoint"
"""The field that names the content: `<method>:<hex digest>`; empty where it was not read."""

MAX_VALUE = 2048
"""Characters of a field's value that travel as they are."""

ABSENT = "(absent)"
"""What a difference shows for the side that lacks the field."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two keys (or recipes) differ, with both values."""

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
    found = []
    for field in sorted(daemon.keys() | engine.keys()):
        theirs, ours = daemon.get(field, ABSENT), engine.get(field, ABSENT)
        if theirs == ours and not (field == CHECKPOINT and not ours):
            continue
        if field == CHECKPOINT and same_files:
            continue
        found.append(Difference(field, theirs, ours))
    return tuple(found)
