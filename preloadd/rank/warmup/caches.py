"""What engines leave in their caches for the next start, told by comparing what is there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from preloadd.warmup.bundles.manifest import AOT, CACHES
from preloadd.warmup.names import TableName, cache_root, chosen_root, is_config_hash, versions_root

_MOST = 4096
"""Names that are looked at: more tell people no more."""


@dataclass(frozen=True, slots=True)
class CacheContents:
    """Tables, as `<hash>/<file>`, and folders of compiled code."""

    tables: frozenset[str] = frozenset()
    compiled: frozenset[str] = frozenset()

    def since(self, before: CacheContents) -> CacheContents:
        """What has come since then."""
        return CacheContents(self.tables - before.tables, self.compiled - before.compiled)


@dataclass(frozen=True, slots=True)
class Caches:
    """Where engines of one environment keep tables and compiled code."""

    tables: Path
    compiled: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Those of an engine with these variables."""
        tables = chosen_root(environ) or versions_root(environ)
        return cls(tables, cache_root(environ) / CACHES)

    def listing(self) -> CacheContents:
        """What there is now. What cannot be read is not there."""
        ahead = self.compiled / AOT
        compiled = {path.name for path in _folders(self.compiled) if path != ahead}
        compiled |= {f"{AOT}/{path.name}" for path in _folders(ahead)}
        tables = {
            f"{path.name}/{name}"
            for path in _hashes(self.tables, depth=2)
            for name in _names(path)
            if TableName.parse(name)
        }
        return CacheContents(frozenset(tables), frozenset(compiled))


def _hashes(root: Path, *, depth: int) -> Iterator[Path]:
    """The folders of configurations: in a root, or in those of versions and architectures."""
    for path in _folders(root):
        if is_config_hash(path.name):
            yield path
        elif depth:
            yield from _hashes(path, depth=depth - 1)


def _folders(root: Path) -> list[Path]:
    with suppress(OSError), os.scandir(root) as found:
        folders = [Path(one.path) for one in found if one.is_dir(follow_symlinks=False)]
        return sorted(folders)[:_MOST]
    return []


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir())[:_MOST]
    return []
