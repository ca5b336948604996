"""What happened: the difference between two looks at a rank, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from preloadd.supervisor.verdict import Contact, Snapshot, complaint

KEPT = 200
"""How many happenings are remembered."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened to a rank. `at` is wall time in seconds since 1970."""

    at: float
    group: str
    instance: str
    condition: str
    text: str


def happenings(before: Snapshot | None, after: Snapshot, *, at: float) -> Iterator[Happening]:
    """What happened between two looks at one rank; with no look before, how it was found."""
    for text in _differences(before, after):
        yield Happening(at, after.group, after.instance, after.condition, text)


def _differences(before: Snapshot | None, after: Snapshot) -> Iterator[str]:
    if before is None or after.condition != before.condition:
        yield complaint(after) or f"serving{_how(after)}"
    if before is None or after.contact is not Contact.ANSWERED:
        return
    if before.pid and after.pid != before.pid:
        yield f"restarted: process {after.pid} after {before.pid}"
    if after.generation != before.generation and before.generation and after.generation:
        yield f"generation {after.generation[:8]} after {before.generation[:8]}{_how(after)}"
    yield from _leases(before, after)


def _leases(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Comings and goings. Neither is told where a rank's list of leases was cut."""
    old = {engine.id: engine for engine in before.engines}
    new = {engine.id: engine for engine in after.engines}
    if len(before.engines) == before.lease_count and len(after.engines) == after.lease_count:
        for id_ in new.keys() - old.keys():
            yield f"engine {new[id_].client} (process {new[id_].pid}) attached, {new[id_].mode}"
        for id_ in old.keys() - new.keys():
            yield f"engine {old[id_].client} (process {old[id_].pid}) left"


def _how(snapshot: Snapshot) -> str:
    if not snapshot.generation:
        return ""
    return ", weights adopted" if snapshot.adopted else ", weights loaded"
