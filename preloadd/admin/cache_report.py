"""What `cache` tells, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from preloadd.admin.cache import Cache
from preloadd.admin.columns import aligned, moment
from preloadd.domain.lines import one_line
from preloadd.warmup.folder import Found
from preloadd.warmup.verdict import FIELDS

_HEADS = ("CONFIGURATION", "FLASHINFER", "GPU", "TABLES", "ENTRIES", "LAST USED", "STATE")


def as_list(caches: Sequence[Cache]) -> str:
    """One configuration a line, below the root that it is in."""
    if not caches:
        return "no tables\n"
    heads, *rows = aligned([_HEADS, *map(_row, caches)])
    lines, root = [], None
    for one, row in zip(caches, rows, strict=True):
        if one.root != root:
            root = one.root
            lines += [f"{one_line(root)}:", heads]
        lines.append(row)
    return _text(lines)


def as_sheet(cache: Cache) -> str:
    """Everything about one configuration."""
    lines = [f"configuration  {cache.config_hash}", f"folder         {one_line(cache.root)}"]
    for one in cache.tables:
        lines += ["", f"{one.name}  last used {moment(one.used)}", *_about(one)]
    told = [*cache.faults, *cache.closed, *cache.notes]
    return _text([*lines, *([""] if told else []), *told])


def as_verdict(caches: Sequence[Cache]) -> str:
    """What is wrong or odd, one a line, then how many there are."""
    count = sum(len(one.tables) for one in caches)
    bad = sum(len(one.faults) for one in caches)
    hidden = sum(one.hidden for one in caches)
    closed = [line for one in caches for line in one.closed]
    faults = [
        f"{fault}; remove it, and the next start tunes anew" for c in caches for fault in c.faults
    ]
    notes = [f"note: {note}" for one in caches for note in one.notes]
    whole = f"{count} tables, {bad} of them not fit for an engine"
    more = [f"not looked at, see above: {hidden}"] if hidden else []
    return _text([*faults, *closed, *notes, "; ".join([whole, *more])])


def as_json(caches: Sequence[Cache]) -> str:
    """The same for machines, entries by operation."""
    return json.dumps({"caches": [_value(one) for one in caches]}, indent=2) + "\n"


def _row(cache: Cache) -> tuple[str, ...]:
    states = {"damaged": cache.faults, "closed": cache.closed, "noted": cache.notes}
    entries = sorted({len(one.table.entries) for one in cache.tables if one.table})
    return (
        cache.config_hash[:12] or "?",
        _common(cache, "flashinfer_version"),
        _common(cache, "gpu"),
        str(len(cache.tables)),
        "-".join(map(str, dict.fromkeys((*entries[:1], *entries[-1:])))) or "?",
        moment(cache.used) if cache.tables else "?",
        next((state for state, told in states.items() if told), "ok"),
    )


def _common(cache: Cache, field: str) -> str:
    found = {(one.table.metadata or {}).get(field) for one in cache.tables if one.table}
    return ", ".join(sorted(one_line(value or "?") for value in found)) or "?"


def _about(one: Found) -> Iterator[str]:
    if one.table is None:
        yield "  not fit for an engine" if one.ends else "  not read, see below"
        return
    if one.table.metadata is None:
        yield "  tuned in an environment that it does not tell"
    else:
        for field in (*FIELDS, *sorted(set(one.table.metadata) - set(FIELDS))):
            yield f"  {one_line(field):<22}  {one_line(one.table.metadata.get(field) or '?')}"
    for op, count in one.table.ops.items():
        yield f"  {count:>6} entries  {one_line(op or 'of operations not named')}"


def _value(cache: Cache) -> dict[str, object]:
    return {
        "root": str(cache.root),
        "hash": cache.config_hash or None,
        "last_used": moment(cache.used) if cache.tables else None,
        "faults": list(cache.faults),
        "closed": list(cache.closed),
        "notes": list(cache.notes),
        "tables": [_table(one) for one in cache.tables],
    }


def _table(one: Found) -> dict[str, object]:
    table = one.table
    return {
        "file": str(one.path),
        "dp_rank": one.name.dp_rank,
        "rank": one.name.rank,
        "last_used": moment(one.used),
        "fault": one.fault,
        "metadata": table.metadata if table else None,
        "intact": table.intact if table else None,
        "entries": table.ops if table else None,
    }


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
