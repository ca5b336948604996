"""What commands besides `status` show, taken from an overview. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from preloadd.cli.exits import Exit
from preloadd.cli.overview import Overview, told


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease and where it is."""

    group: str
    instance: str
    client: str
    pid: int
    mode: str
    generation: str


@dataclass(frozen=True, slots=True)
class Leases:
    """All leases that were told, how many there are, and why some may be missing."""

    total: int
    leases: tuple[LeaseRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit_status(self) -> Exit:
        """What `leases` ends with."""
        return Exit.NOT_SERVING if self.notes else Exit.DONE


@dataclass(frozen=True, slots=True)
class RunningVersion:
    """The version that a rank runs."""

    group: str
    instance: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed and what runs. `matches` if all that told a version run this one."""

    installed: str
    matches: bool
    ranks: tuple[RunningVersion, ...] = ()


def leases(seen: Overview) -> Leases:
    """Who holds weights."""
    rows = [
        LeaseRow(rank.group, rank.instance, e.client, e.pid, e.mode, e.generation)
        for rank in seen.ranks
        for e in rank.leases
    ]
    total = sum(rank.lease_count or 0 for rank in seen.ranks)
    unknown = tuple(f"not known: {told(rank)}" for rank in seen.ranks if rank.in_use is None)
    return Leases(total, tuple(rows), (*seen.notes, *unknown))


def versions(installed: str, seen: Overview) -> Versions:
    """What runs, against what is installed."""
    running = tuple(
        RunningVersion(rank.group, rank.instance, rank.pid, rank.version)
        for rank in seen.ranks
        if rank.version
    )
    return Versions(installed, all(rank.version == installed for rank in running), running)
