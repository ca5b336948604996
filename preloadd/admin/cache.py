"""`preloadd admin cache`: FlashInfer's tables on this host, moved, judged and removed."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from preloadd.admin.environment import user_name
from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, ErrorCode, InsecurePath, PreloadError
from preloadd.warmup import folder
from preloadd.warmup.folder import Found
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import OVERRIDE, TableName, chosen_root, is_config_hash, versions_root
from preloadd.warmup.table import BadTable, Table
from preloadd.warmup.verdict import unknown_fields

LEAST_PREFIX = 4
"""Letters of a hash that may stand for all of it."""


class NoSuchCache(PreloadError):
    """There are no tables of that configuration; the text says where they were looked for."""

    code: ClassVar[ErrorCode] = ErrorCode.NOT_FOUND


@dataclass(frozen=True, slots=True)
class Cache:
    """The tables of one configuration in one root; there is at least one."""

    root: Path
    config_hash: str
    tables: tuple[Found, ...]

    @property
    def used(self) -> float:
        """The wall time at which one of them was last written or read."""
        return max(one.used for one in self.tables)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with them so that an engine could end, one a line."""
        return tuple(f"{one_line(t.path)}: {t.fault}" for t in self.tables if t.fault)

    @property
    def notes(self) -> tuple[str, ...]:
        """What keeps engines from using them, or is odd."""
        return (*(note for one in self.tables for note in _notes(one)), *_uneven(self.tables))


def roots_of(environ: Mapping[str, str], chosen: Path | None, *, new: bool = False) -> list[Path]:
    """The roots in which to look: the chosen one, else those of an engine with this environment.

    ConfigError if the chosen one is not there, unless a `new` one may be made.
    """
    if chosen is not None and not chosen.is_dir() and not (new and not chosen.exists()):
        raise ConfigError(f"{one_line(chosen)}: there is no such folder: correct --root")
    told = chosen or chosen_root(environ)
    if told is not None:
        return [told]
    return sorted(path for path in versions_root(environ).glob("*/*") if path.is_dir())


def caches_in(roots: Sequence[Path]) -> list[Cache]:
    """All that have a table."""
    return [
        Cache(root, config_hash, tuple(tables))
        for root in roots
        for config_hash in folder.hashes(root)
        if (tables := folder.tables(root, config_hash))
    ]


def pick(roots: Sequence[Path], prefix: str) -> Cache:
    """The only one whose hash begins so; NoSuchCache or ConfigError with those there are."""
    there = caches_in(roots)
    found = [one for one in there if _begins(one.config_hash, prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{one_line(prefix)} may be any of these: write more letters, or choose with --root:\n"
            + "\n".join(f"{one.config_hash} in {one_line(one.root)}" for one in found)
        )
    known = ", ".join(sorted({one.config_hash[:12] for one in there})) or "none"
    raise NoSuchCache(
        f"there are no tables of a configuration {one_line(prefix)!r} in {_named(roots)}: those "
        f"there are: {known}"
    )


def export(cache: Cache, target: Path) -> list[Path]:
    """Copy the tables to the same names in `target`, all or none; those that were not there yet.

    BadTable if one of them is none; TableConflict where others are.
    """
    _require_own(target)
    return folder.install(target, cache.config_hash, _sound(cache), Existing.KEEP)


def sources(path: Path) -> list[Cache]:
    """What was exported to `path`, or is in it where that is the folder of one configuration.

    BadTable for any that is none; NoSuchCache where there is nothing.
    """
    whole = path.absolute()
    found = caches_in([whole]) if whole.is_dir() else []
    if is_config_hash(whole.name):
        found = [one for one in caches_in([whole.parent]) if one.config_hash == whole.name]
    if not found:
        raise NoSuchCache(
            f"there are no tables in {one_line(path)}: name a folder that `cache export` wrote, "
            "or one of vLLM's that is called by the hash of a configuration"
        )
    for one in found:
        _sound(one)
    return found


def target_of(cache: Cache, roots: Sequence[Path]) -> Path:
    """The root in which engines will look for `cache`; ConfigError if that cannot be known."""
    if len(roots) == 1:
        return roots[0]
    versions = {
        (table.metadata or {}).get("flashinfer_version") for table in _sound(cache).values()
    }
    found = [root for root in roots if root.parent.name in versions]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"engines may look for {cache.config_hash[:12]} in {_named(found or roots)}: choose with "
        f"--root (or {OVERRIDE}) the folder <FlashInfer's version>/<architectures> below "
        "flashinfer_autotune_cache"
    )


def put(cache: Cache, root: Path, existing: Existing) -> list[Path]:
    """Install the tables of one configuration, all or none; the files that were written."""
    _require_own(root)
    return folder.install(root, cache.config_hash, _sound(cache), existing)


def prunable(
    caches: Sequence[Cache],
    *,
    before: float | None,
    only: Collection[str],
    keep: Collection[str],
) -> list[Cache]:
    """Those that were last used before that wall time, among `only` (all if empty), never `keep`.

    Hashes may be given by their first letters; NoSuchCache for one that is of none.
    """
    for prefix in (*only, *keep):
        if not any(_begins(one.config_hash, prefix) for one in caches):
            raise NoSuchCache(
                f"there are no tables of a configuration {one_line(prefix)!r}, and nothing was "
                f"removed: write at least {LEAST_PREFIX} letters of a hash that `cache list` tells"
            )
    return [
        one
        for one in caches
        if (before is None or one.used < before)
        and (not only or any(_begins(one.config_hash, prefix) for prefix in only))
        and not any(_begins(one.config_hash, prefix) for prefix in keep)
    ]


def prune(caches: Sequence[Cache]) -> list[Path]:
    """Remove the tables; their files. What else lies in their folders stays."""
    for one in caches:
        _require_own(one.root / one.config_hash)
    return [path for one in caches for path in folder.remove(one.root, one.config_hash)]


def _begins(config_hash: str, prefix: str) -> bool:
    return len(prefix) >= LEAST_PREFIX and config_hash.startswith(prefix)


def _named(roots: Sequence[Path]) -> str:
    return ", ".join(map(one_line, roots)) or "any folder of vLLM's cache"


def _sound(cache: Cache) -> dict[TableName, Table]:
    found = {}
    for one in cache.tables:
        if one.table is None:
            raise BadTable(str(one.path), one.fault)
        found[one.name] = one.table
    return found


def _require_own(path: Path) -> None:
    """InsecurePath if this is root and the nearest folder that there is another user's: that one
    could turn it anywhere, and would not be able to use what root leaves there."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if os.geteuid() == 0 and (owner := there.stat().st_uid):
        raise InsecurePath(
            f"{one_line(there)} belongs to {user_name(owner)}, and root writes nothing there: run "
            f"this as that user, `setpriv --reuid {owner} --clear-groups preloadctl cache …`"
        )


def _notes(one: Found) -> Iterator[str]:
    if one.table is None:
        return
    name = one_line(one.path)
    if fields := unknown_fields(one.table.metadata):
        yield (
            f"{name}: {', '.join(fields)} not known where it was tuned: FlashInfer does not use "
            "it, and tunes anew"
        )
    if one.table.intact is False:
        yield f"{name}: its digest is not that of its content: it was edited, or damaged"
    if ignored := sum(entry.ignored for entry in one.table.entries.values()):
        yield f"{name}: {ignored} entries have plans of cuDNN by number: FlashInfer ignores those"


def _uneven(tables: Sequence[Found]) -> Iterator[str]:
    for dp_rank in sorted({one.name.dp_rank for one in tables}):
        ranks = [one for one in tables if one.name.dp_rank == dp_rank and one.table]
        kinds = {one.table.fingerprint for one in ranks if one.table}
        if len(kinds) > 1:
            yield (
                f"{one_line(ranks[0].path.parent)}: ranks of dp{dp_rank} differ in where they were "
                "tuned or in the number of entries: unless they are stages of a pipeline, every "
                "start tunes anew; prune this configuration"
            )
