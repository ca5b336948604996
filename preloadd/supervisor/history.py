"""What happened: the differences between looks at a rank, in words. Pure."""

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


class History:
    """Of one rank: what was seen of it last, and what it last answered before it fell silent."""

    def __init__(self) -> None:
        self._seen: Snapshot | None = None
        self._answer: Snapshot | None = None

    @property
    def standing(self) -> tuple[str, bool] | None:
        """As it was seen last; None before."""
        return self._seen.standing if self._seen is not None else None

    def add(self, now: Snapshot, *, at: float) -> list[Happening]:
        """What has happened up to this look; at the first one, how the rank was found."""
        texts = [*self._change(now)]
        self._seen = now
        if now.contact is Contact.ANSWERED:
            if self._answer is not None:
                texts += _differences(self._answer, now)
            self._answer = now
        return [Happening(at, now.group, now.instance, now.condition, text) for text in texts]

    def _change(self, now: Snapshot) -> Iterator[str]:
        if now.standing != self.standing:
            yield complaint(now) or f"serving{_how(now)}"


def _differences(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Between two answers, whatever came between them: leases outlive a process of the rank."""
    if after.pid != before.pid:
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
