"""Leases: who is attached to which generation, who may free it, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from preloadd.domain.ids import GenerationId, LeaseId, client_name, generation_id, lease_id

LEASE = "lease."
"""Begins the names under which leases are parked."""

PROFILING = "profiling."
"""Begins the names of marks that leases profile."""


class Mode(StrEnum):
    """How an engine holds weights: mapped read-only, or copied into memory of its own."""

    ZERO_COPY = "zero_copy"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Lease:
    """An engine's open connection. `client` is what the engine calls itself; `pid` its process."""

    id: LeaseId
    generation: GenerationId
    mode: Mode
    client: str
    pid: int

    @property
    def fdname(self) -> str:
        """The name under which the connection is parked: all that must survive the daemon."""
        return f"{LEASE}{self.id}.{self.generation}.{self.mode}.{client_name(self.client)}"

    @classmethod
    def from_fdname(cls, name: str, *, pid: int) -> Self:
        """The lease that was parked as `name`; ValueError if the name is none of ours."""
        parts = name.split(".")
        if len(parts) != 5 or f"{parts[0]}." != LEASE:
            raise ValueError(f"{name!r} names no lease")
        return cls(
            lease_id(parts[1]), generation_id(parts[2]), Mode(parts[3]), client_name(parts[4]), pid
        )


def may_release(leases: Iterable[Lease], asker: LeaseId | None, *, operator: bool) -> str | None:
    """Why the weights may not be freed for `asker`, or None when they may.

    A lease holder must have copied them and be the only one; an operator (who holds no lease) must
    find none.
    """
    held = {lease.id: lease for lease in leases}
    own = held.pop(asker, None) if asker is not None else None
    if own is None and not operator:
        return "only the sole lease holder, root or the daemon's own user may release the weights"
    if own is not None and own.mode is not Mode.COPY:
        return "a zero-copy engine uses the weights: only one that copied them may release them"
    if held:
        names = ", ".join(f"{lease.client} (pid {lease.pid})" for lease in [*held.values()][:5])
        return f"{len(held)} other engine(s) hold the weights: {names}"
    return None


class Profilers:
    """Leases whose engines measure how much memory of their device is free.

    What is freed meanwhile would count as theirs, so nothing is. Each is believed for `patience`
    seconds at most from when it begins or is resumed. Times are monotonic seconds.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._until: dict[LeaseId, float] = {}

    def begin(self, lease: LeaseId, now: float) -> float:
        """A lease profiles from now on; until when it is believed."""
        self._until[lease] = now + self._patience
        return self._until[lease]

    def resume(self, lease: LeaseId, until: float, now: float) -> None:
        """A lease profiles again, or told an earlier daemon: it is believed as long as before."""
        self._until[lease] = min(until, now + self._patience)

    def end(self, lease: LeaseId) -> bool:
        """A lease profiles no more; whether it had begun."""
        return self._until.pop(lease, None) is not None

    def active(self, now: float) -> set[LeaseId]:
        """Those that profile now."""
        return {lease for lease, until in self._until.items() if until > now}

    def wait(self, now: float, *, but: LeaseId | None = None) -> float:
        """Seconds after which nothing hinders freeing memory, if none ends or begins before.

        Whoever asks for it does not hinder itself: `but` does not count.
        """
        left = (until - now for lease, until in self._until.items() if lease != but)
        return max(0.0, max(left, default=0.0))
