"""Leases: who is attached to which generation, and who may free it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from preloadd.domain.ids import GenerationId, LeaseId, client_name, generation_id, lease_id


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
        return f"lease.{self.id}.{self.generation}.{self.mode}.{client_name(self.client)}"

    @classmethod
    def from_fdname(cls, name: str, *, pid: int) -> Self:
        """The lease that was parked as `name`; ValueError if the name is none of ours."""
        parts = name.split(".")
        if len(parts) != 5 or parts[0] != "lease":
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
