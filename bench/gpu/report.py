"""What a benchmark on the GPU found: one table for people, JSON for programs.

JSON is written anew after every figure, so that whatever ends a run leaves what it had found.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

import preloadd
from bench.gpu.meter import MIB, NOTHING

PACKAGES = (
    *("torch", "cuda-bindings", "safetensors", "blake3"),
    *("fastsafetensors", "instanttensor", "runai-model-streamer"),
    *("flashinfer-python", "vllm"),
)
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `target` says what was promised, `met` whether it holds, None without a target.

    `samples` are what `value` is the median of; `value` is None where something was not measured,
    and `note` says why.
    """

    part: str
    what: str
    value: float | None
    unit: str = ""
    target: str = ""
    met: bool | None = None
    samples: list[float] = field(default_factory=list)
    note: str = ""


class Report:
    """The rows of one run and the facts of the machine they hold for. `path` None: no JSON."""

    def __init__(self, bench: str, path: Path | None) -> None:
        self.facts: dict[str, object] = {"bench": bench, **_facts()}
        self.rows: list[Row] = []
        self.faults: dict[str, str] = {}
        self._path = path
        self._started = time.monotonic()
        self._write()

    def figure(
        self,
        part: str,
        what: str,
        found: float | Sequence[float],
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        note: str = "",
    ) -> float:
        """Keep a figure, or the median of several, and whether it is as promised; the figure."""
        samples = [] if isinstance(found, (int, float)) else list(found)
        value = found if isinstance(found, (int, float)) else statistics.median(samples)
        target, met = "", None
        if at_most is not None:
            target, met = f"≤ {at_most:g} {unit}".rstrip(), value <= at_most
        if at_least is not None:
            target, met = f"≥ {at_least:g} {unit}".rstrip(), value >= at_least
        self._add(Row(part, what, value, unit, target, met, samples, note))
        return value

    def nothing(self, part: str, what: str, nbytes: int) -> None:
        """Keep device memory that was promised to be none; shown in MiB."""
        target = "0 (< 2 MiB)"
        self._add(Row(part, what, nbytes / MIB, "MiB", target, abs(nbytes) <= NOTHING))

    def holds(self, part: str, what: str, met: bool, note: str = "") -> None:  # noqa: FBT001
        """Keep something that was promised to hold."""
        self._add(Row(part, what, float(met), "", "holds", met, note=note))

    def absent(self, part: str, what: str, why: str) -> None:
        """Keep that something was not measured."""
        self._add(Row(part, what, None, note=why))

    def failed(self, part: str, why: str) -> None:
        """Keep that a whole part gave up."""
        self.faults[part] = why
        self.tell(f"{part}: FAILED: {why}")
        self._write()

    def tell(self, text: str) -> None:
        """Progress, for whoever waits."""
        seconds = time.monotonic() - self._started
        print(f"[{seconds:6.1f} s] {text}", file=sys.stderr, flush=True)

    def show(self) -> None:
        """Print the table."""
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
        console.print(table_of({**self.facts, "rows": self.rows, "faults": self.faults}))

    @property
    def bad(self) -> bool:
        """Whether a promise is broken, or a part gave up."""
        return bool(self.faults) or any(row.met is False for row in self.rows)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.tell(f"{row.part}: {row.what}: {_figure(row)} {_verdict(row)}".rstrip())
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        found = {**self.facts, "seconds": round(time.monotonic() - self._started, 1)}
        found |= {"faults": self.faults, "rows": [asdict(row) for row in self.rows]}
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(self._path)


def table_of(found: dict[str, object]) -> Table:
    """What a report found, as a table."""
    rows, faults = found["rows"], found["faults"]
    assert isinstance(rows, list)
    assert isinstance(faults, dict)
    card, driver = found.get("card", "no GPU"), found.get("driver", "")
    table = Table(title=f"{found['bench']}: {found['date']}, {card} {driver}".rstrip())
    for name, justify in (("part", "left"), ("what", "left"), ("figure", "right")):
        table.add_column(name, justify=justify, overflow="fold")
    for name in ("target", "met", "note"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row.part, row.what, _figure(row), row.target, _verdict(row), row.note)
    for part, why in faults.items():
        table.add_row(part, "gave up", "-", "", "NO", why)
    return table


def _figure(row: Row) -> str:
    if row.value is None:
        return "-"
    if row.target == "holds":
        return "yes" if row.value else "no"
    number = f"{row.value:,.0f}" if row.value == round(row.value) else f"{row.value:,.2f}"
    return f"{number} {row.unit}".rstrip()


def _verdict(row: Row) -> str:
    return {True: "yes", False: "NO", None: ""}[row.met]


def _facts() -> dict[str, object]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "preloadd": preloadd.__version__,
        "commit": _commit(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """What is measured, where this is a checkout and git is there to ask."""
    command = ["git", "-C", os.fspath(_ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
