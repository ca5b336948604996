"""A table of FlashInfer's autotuner, format v1: which kernel is fastest for which shapes.

One JSON object per rank: `_metadata` (where it was tuned), `_records` (of products that use the
tuner), `_generation` (a digest of the rest); every other name is an entry. FlashInfer's loader
checks no entry, and an engine does not survive what it raises: what `parse` returns, it loads
without raising. It may still not use it, see `verdict`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeGuard

from preloadd.domain.lines import one_line
from preloadd.domain.strict_json import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_NBYTES,
    Malformed,
    decode,
    is_deeper,
)
from preloadd.errors import ErrorCode, PreloadError

METADATA = "_metadata"
RECORDS = "_records"
GENERATION = "_generation"

MAX_ENTRIES = 1 << 16
MAX_KEY = 1 << 14
"""Characters of an entry's name, which spells all its shapes."""

MAX_NAME = 256
"""Characters of the name of a runner, of a field of metadata, of a namespace."""

MAX_VALUE = 4096
MAX_FIELDS = 64
MAX_PARTS = 16

_OP = re.compile(r"\('([^'\\]{1,256})', ")
_BRIEF = 100


class BadTable(PreloadError):
    """This is no table, or one whose loading could stop an engine; the text names file, entry.

    It is `harmless` where FlashInfer's loader is known to return: that is still none to hand on.
    """

    code: ClassVar[ErrorCode] = ErrorCode.DAMAGED

    def __init__(self, source: str, why: str, *, harmless: bool = False) -> None:
        self.why, self.harmless = why, harmless
        end = "no engine ends by it" if harmless else "an engine could end when it loads this"
        super().__init__(
            f"{one_line(source)}: {why}; {end}: remove the file, and the next start tunes anew"
        )


class Entry(NamedTuple):
    """The fastest `runner` and its `tactic`; `rest` is how that was measured, if that is known."""

    runner: str
    tactic: object
    rest: tuple[object, ...] = ()

    @property
    def ignored(self) -> bool:
        """Whether FlashInfer passes over it: plans of cuDNN by number mean nothing any more."""
        return self.runner.startswith("Cudnn") and isinstance(self.tactic, int) and self.tactic >= 0


@dataclass(frozen=True, slots=True)
class Table:
    """A whole table. `metadata` is None in old ones, as are the others where there are none.

    `intact` is whether the digest is that of the content; None without a digest.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str | None] | None = None
    records: Mapping[str, Mapping[str, object]] | None = None
    generation: str | None = None
    intact: bool | None = None

    @property
    def fingerprint(self) -> tuple[str, int]:
        """What vLLM compares between ranks: if two differ, all of them tune."""
        more = (self.records is not None) + (self.generation is not None)
        return json.dumps(self.metadata, sort_keys=True), len(self.entries) + more

    @property
    def ops(self) -> Mapping[str, int]:
        """How many entries each operation has; '' is for those whose name does not tell."""
        counts: dict[str, int] = {}
        for key in self.entries:
            found = _OP.match(key)
            op = found[1] if found else ""
            counts[op] = counts.get(op, 0) + 1
        return dict(sorted(counts.items()))


def parse(raw: bytes, source: str) -> Table:
    """The table that `raw` holds; BadTable, which calls it `source`."""
    try:
        return _table(decode(raw))
    except Malformed as error:
        raise BadTable(source, str(error), harmless=_is_survived(raw)) from None


def from_json(value: object, source: str) -> Table:
    """The table that is `value`, which `strict_json.decode` read as part of more; BadTable."""
    try:
        return _table(value)
    except Malformed as error:
        raise BadTable(source, str(error)) from None


def render(table: Table) -> bytes:
    """`table` as FlashInfer writes it, with a fresh digest; ASCII, whatever its reader's locale."""
    body: dict[str, object] = {}
    if table.metadata is not None:
        body[METADATA] = dict(table.metadata)
    if table.records:
        body[RECORDS] = dict(table.records)
    for key in sorted(table.entries):
        runner, tactic, rest = table.entries[key]
        body[key] = [runner, tactic, *rest]
    body[GENERATION] = _digest(body)
    return json.dumps(body, indent=2).encode("ascii")


def written(table: Table, source: str) -> bytes:
    """`table` as it is to be in a file; BadTable if nobody could read that again.

    It takes more room there than where it was read: in files each value has a line of its own.
    """
    content = render(table)
    parse(content, source)
    return content


def _table(value: object) -> Table:
    if not isinstance(value, dict):
        raise Malformed("it is no JSON object")
    body = dict(value)
    generation = _generation(body)
    intact = None if generation is None else generation == _digest(body)
    metadata = _metadata(body.pop(METADATA, None))
    records = _records(body.pop(RECORDS)) if RECORDS in body else None
    if len(body) > MAX_ENTRIES:
        raise Malformed(f"it has more than {MAX_ENTRIES:,} entries")
    entries = {key: _entry(key, found) for key, found in body.items()}
    return Table(entries, metadata, records, generation, intact)


def _is_survived(raw: bytes) -> bool:
    """Whether FlashInfer's loader returns from what is no table for us.

    Its reader takes numbers such as NaN, and names that are there twice. For metadata that are no
    object it uses no entry, and looks at none.
    """
    if len(raw) > MAX_NBYTES or raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
        return False
    try:
        body = json.loads(raw.decode("utf-8"))
        if not isinstance(body, dict) or is_deeper(body, MAX_DEPTH):
            return False
        if isinstance(body.get(METADATA), dict | None):
            _table(body)
    except (ValueError, RecursionError):  # Malformed is one
        return False
    return True


def _digest(body: Mapping[str, object]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _generation(body: dict[str, object]) -> str | None:
    if GENERATION not in body:
        return None
    found = body.pop(GENERATION)
    if not isinstance(found, str) or len(found) > MAX_NAME:
        raise Malformed(f"{GENERATION} is no digest")
    return found


def _metadata(found: object) -> Mapping[str, str | None] | None:
    if found is None:
        return None
    if not isinstance(found, dict) or len(found) > MAX_FIELDS:
        raise Malformed(f"{METADATA} is no object of at most {MAX_FIELDS} fields")
    for name, value in found.items():
        if len(name) > MAX_NAME or not (value is None or _is_text(value, MAX_VALUE)):
            raise Malformed(
                f"{METADATA}: {_brief(name)} has no text of at most {MAX_VALUE} letters"
            )
    return found


def _records(found: object) -> Mapping[str, Mapping[str, object]]:
    if not isinstance(found, dict) or len(found) > MAX_FIELDS:
        raise Malformed(f"{RECORDS} is no object of at most {MAX_FIELDS} namespaces")
    for name, value in found.items():
        if not _is_text(name, MAX_NAME) or not name or name.startswith("_"):
            raise Malformed(f"{RECORDS}: {_brief(name)} is no name of a namespace")
        if not isinstance(value, dict):
            raise Malformed(f"{RECORDS}: {_brief(name)} is no object")
    return found


def _entry(key: str, value: object) -> Entry:
    if not key or len(key) > MAX_KEY:
        raise Malformed(f"entry {_brief(key)}: its name has not 1 to {MAX_KEY:,} letters")
    if not isinstance(value, list) or not 2 <= len(value) <= MAX_PARTS:
        raise Malformed(f"entry {_brief(key)} is no list of runner, tactic and what may follow")
    runner, tactic, *rest = value
    if not _is_text(runner, MAX_NAME) or not runner:
        raise Malformed(f"entry {_brief(key)}: its runner is no name")
    if not _is_plain(tactic):
        raise Malformed(f"entry {_brief(key)}: its tactic is neither a value nor lists of values")
    if rest and not (isinstance(rest[0], list) and _is_plain(rest[0])):
        raise Malformed(f"entry {_brief(key)}: its policy is no list of values")
    return Entry(runner, tactic, tuple(rest))


def _is_text(value: object, most: int) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= most


def _is_plain(value: object) -> bool:
    """A value, or lists of them: as tuples they can be looked up, which objects cannot."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return not isinstance(value, dict)


def _brief(text: str) -> str:
    return one_line(text if len(text) <= _BRIEF else f"{text[:_BRIEF]}…")
