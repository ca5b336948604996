"""`preloadctl cache`: FlashInfer's tables on this host, moved, judged and removed."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from preloadd.admin.cache_errors import Closed, closed
from preloadd.admin.environment import user_name
from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, ErrorCode, InsecurePath, PreloadError
from preloadd.warmup import folder
from preloadd.warmup.folder import CLOSED, Found
from preloadd.warmup.merge import Existing, settle
from preloadd.warmup.names import OVERRIDE, TableName, chosen_root, is_config_hash, versions_root
from preloadd.warmup.table import BadTable, Table, parse, written
from preloadd.warmup.verdict import unknown_fields

LEAST_PREFIX = 4
"""Letters of a hash that may stand for all of it."""


class NoSuchCache(PreloadError):
    """There are no tables of that configuration; the text says where they were looked for."""

    code: ClassVar[ErrorCode] = ErrorCode.NOT_FOUND


@dataclass(frozen=True, slots=True)
class Cache:
    """The tables of one configuration in one root; there is at least one, unless they are `unseen`.

    That says why its folder is not looked into: Closed, or InsecurePath for a link. A whole root
    that is closed has no `config_hash`.
    """

    root: Path
    config_hash: str
    tables: tuple[Found, ...]
    unseen: PreloadError | None = None

    @property
    def used(self) -> float:
        """The wall time at which one of them was last written or read; 0 if that is unseen."""
        return max((one.used for one in self.tables), default=0.0)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with them so that an engine could end, one a line."""
        return tuple(f"{one_line(t.path)}: {t.fault}" for t in self.tables if t.ends)

    @property
    def closed(self) -> tuple[str, ...]:
        """What this user may not look at, and who may, one a line."""
        folders = [self.unseen] if isinstance(self.unseen, Closed) else []
        files = [closed(one.path) for one in self.tables if one.fault == CLOSED]
        return tuple(map(str, (*folders, *files)))

    @property
    def hidden(self) -> int:
        """How many of its folder and tables are not looked at: closed ones and links."""
        return len(self.closed) or int(self.unseen is not None)

    @property
    def notes(self) -> tuple[str, ...]:
        """What keeps engines from using them, or is odd."""
        links = [str(self.unseen)] if isinstance(self.unseen, InsecurePath) else []
        tables = [note for one in self.tables for note in _notes(one)]
        return (*links, *tables, *_uneven(self.tables))


def roots_of(environ: Mapping[str, str], chosen: Path | None, *, new: bool = False) -> list[Path]:
    """The roots in which to look: the chosen one, else those of an engine with this environment.

    ConfigError if the chosen one is not there, unless a `new` one may be made.
    """
    if chosen is not None and not (new and not chosen.exists()):
        require_folder(chosen)
    told = chosen or chosen_root(environ)
    if told is not None:
        return [told]
    return list(_roots(versions_root(environ)))


def require_folder(root: Path) -> None:
    """ConfigError unless the root that was chosen is there."""
    if not root.is_dir():
        raise ConfigError(f"{one_line(root)}: there is no such folder: correct --root")


def caches_in(roots: Sequence[Path]) -> list[Cache]:
    """All that have a table, or may have. PermissionError for the only root."""
    found: list[Cache] = []
    for root in roots:
        try:
            found += sorted((*_seen(root), *_links(root)), key=lambda one: one.config_hash)
        except PermissionError:
            if len(roots) == 1:
                raise
            found.append(Cache(root, "", (), closed(root)))
    return found


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
    least = "" if len(prefix) >= LEAST_PREFIX else f"write at least {LEAST_PREFIX} letters of "
    raise NoSuchCache(
        f"there are no tables of a configuration {one_line(prefix)!r} in {_named(roots)}: "
        f"{least}those there are: {known}"
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


def settled(cache: Cache, root: Path, existing: Existing) -> Mapping[TableName, Table]:
    """What `put` is to install; all that it would raise, as far as that can be known before."""
    path, new = root / cache.config_hash, _sound(cache)
    _require_own(root)
    _require_own(path)
    _require_writable(root, path)
    for name, table in new.items():
        source, wanted = str(path / str(name)), table
        raw = folder.stored(root, cache.config_hash, name)
        if raw is not None and (old := _parsed(raw)) is not None:
            wanted = settle(old, table, existing, source)
        written(wanted, source)
    return new


def put(cache: Cache, root: Path, existing: Existing) -> list[Path]:
    """Install the tables of one configuration, all or none; the files that were written."""
    return folder.install(root, cache.config_hash, settled(cache, root, existing), existing)


def prunable(
    caches: Sequence[Cache],
    *,
    before: float | None,
    only: Collection[str],
    keep: Collection[str],
) -> list[Cache]:
    """Those that were last used before that wall time, as far as that can be seen, among `only`
    (all if empty), never `keep`.

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


def prune(cache: Cache) -> None:
    """Remove the tables. What else lies in their folder stays, and is told if it is named as one:
    InsecurePath."""
    _require_own(cache.root / cache.config_hash)
    folder.remove(cache.root, cache.config_hash)
    if left := [one.path for one in cache.tables if one.path.is_dir()]:
        texts = [f"{one_line(path)} is a folder, and stays: remove it by hand" for path in left]
        raise InsecurePath("\n".join(texts))


def _roots(versions: Path) -> Iterator[Path]:
    """Those of all versions. A version whose folder is closed stands for its own."""
    for version in sorted(versions.iterdir()) if versions.is_dir() else ():
        with suppress(NotADirectoryError):
            try:
                yield from [path for path in sorted(version.iterdir()) if path.is_dir()]
            except PermissionError:
                yield version


def _seen(root: Path) -> Iterator[Cache]:
    """Those in folders. PermissionError if it cannot be known which there are."""
    for config_hash in folder.hashes(root):
        try:
            if tables := folder.tables(root, config_hash):
                yield Cache(root, config_hash, tuple(tables))
        except PermissionError:
            yield Cache(root, config_hash, (), closed(root / config_hash))


def _links(root: Path) -> Iterator[Cache]:
    """Those that are links, which engines follow."""
    names = []
    with suppress(FileNotFoundError), os.scandir(root) as entries:
        names = [one.name for one in entries if is_config_hash(one.name) and one.is_symlink()]
    for name in names:
        text = (
            f"{one_line(root / name)} is a symbolic link, which engines follow, and this does not"
        )
        yield Cache(root, name, (), InsecurePath(f"{text}: put the folder itself there"))


def _parsed(raw: bytes) -> Table | None:
    try:
        return parse(raw, "")
    except BadTable:
        return None


def _begins(config_hash: str, prefix: str) -> bool:
    return len(prefix) >= LEAST_PREFIX and config_hash.startswith(prefix)


def _named(roots: Sequence[Path]) -> str:
    return ", ".join(map(one_line, roots)) or "any folder of vLLM's cache"


def _sound(cache: Cache) -> dict[TableName, Table]:
    if cache.unseen is not None:
        raise cache.unseen
    found = {}
    for one in cache.tables:
        if one.fault == CLOSED:
            raise closed(one.path)
        if one.table is None:
            raise BadTable(str(one.path), one.fault, harmless=not one.ends)
        found[one.name] = one.table
    return found


def _require_writable(root: Path, path: Path) -> None:
    """Closed if `path`, which is in `root`, cannot be written or made; InsecurePath if others can
    put something there. A root may be of a group: engines make it so where each user has one."""
    for one, others in ((root, stat.S_IWOTH), (path, stat.S_IWGRP | stat.S_IWOTH)):
        mode = stat.S_IMODE(one.stat().st_mode) if one.is_dir() else 0
        if mode & others and not (one == root and mode & stat.S_ISVTX):
            raise InsecurePath(
                f"{one_line(one)} is writable for others (mode {mode:04o}), who could replace what "
                f"is in it: run `chmod go-w {one_line(one)}`"
            )
    whole = path.absolute()
    near = next(one for one in (whole, *whole.parents) if one.exists())
    if not os.access(near, os.W_OK | os.X_OK, effective_ids=True):
        raise closed(path)


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
    name = one_line(one.path)
    if one.table is None:
        if not one.ends and one.fault != CLOSED:
            yield (
                f"{name}: {one.fault}: no engine ends by it, but it is neither exported nor "
                "imported; remove it, and the next start tunes anew"
            )
        return
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
