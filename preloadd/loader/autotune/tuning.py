"""One tuning pass: every problem tuned, the table proved by using it, and only then installed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from preloadd.domain.amounts import size
from preloadd.errors import PreloadError
from preloadd.loader.autotune import gemms
from preloadd.loader.autotune.gemms import Counted, Gemms
from preloadd.loader.autotune.problems import Problem
from preloadd.warmup.folder import install
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import TableName
from preloadd.warmup.table import Table, parse

Tell = Callable[[int, int], None]
"""How many problems of how many are done."""


class NotTuned(PreloadError):
    """There is no table, though nothing else went wrong; the text says what FlashInfer left out."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """Where a table goes."""

    root: Path
    config_hash: str
    name: TableName


def tune(found: Sequence[Problem], device: str, place: TableFile, tell: Tell) -> tuple[int, int]:
    """Tune and install; entries of the table, and lookups that it answered when it was tried.

    NotTuned, BadTable, TableConflict, InsecurePath, OSError, and whatever FlashInfer raises. The
    table is written whole, with an answer to every problem, or not at all.
    """
    with tempfile.TemporaryDirectory(prefix="preloadd-") as folder:
        path = Path(folder, str(place.name))
        calls = Gemms(device)
        with gemms.tuning(path):
            for done, problem in enumerate(found):
                tell(done, len(found))
                calls.run(problem, problem.rows)
                calls.give_up()
        tell(len(found), len(found))
        table = _written(path)
        counted = _tried(found, calls, path, device)
    install(place.root, place.config_hash, {place.name: table}, Existing.REPLACE)
    return len(table.entries), counted.hits


def _written(path: Path) -> Table:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise NotTuned(
            "FlashInfer wrote no table: it has nothing to choose among, or is told to by its own "
            "environment variables"
        ) from None
    return parse(raw, path.name)


def _tried(found: Sequence[Problem], calls: Gemms, path: Path, device: str) -> Counted:
    """Use the table as an engine does; NotTuned if it lacks something.

    Where FlashInfer runs out of memory it goes on with its defaults and says so in no result.
    """
    lacking: list[Problem] = []
    with gemms.replaying(path) as counted:
        for problem in found:
            before = counted.misses
            for rows in problem.batches:
                calls.run(problem, rows)
            calls.give_up()
            if counted.misses > before:
                lacking.append(problem)
    if lacking:
        raise NotTuned(
            f"FlashInfer kept its defaults for {counted.misses} of "
            f"{counted.hits + counted.misses} sizes ({lacking[0]} and {len(lacking) - 1} more "
            f"kinds): it does so where a GPU has too little memory left ({size(gemms.free(device))}"
            " are free), and no table was written: free some, and load again"
        )
    return counted
