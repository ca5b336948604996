"""What a rank tells of leases, of differing keys, and of a group that is divided."""

from __future__ import annotations

from collections.abc import Sequence

from preloadd.domain.key import Difference
from preloadd.domain.leases import Lease, Mode
from preloadd.domain.settings import RankSettings
from preloadd.protocol import messages as m

_MAX_FIELDS = 64
_MAX_VALUE = 512


def mismatched(found: tuple[Difference, ...]) -> m.Mismatched:
    """The fields in which keys differ, in number and length bounded."""
    return m.Mismatched(
        fields=tuple(
            m.Field(name=d.field, daemon=d.daemon[:_MAX_VALUE], engine=d.engine[:_MAX_VALUE])
            for d in found[:_MAX_FIELDS]
        )
    )


def lease_told(lease: Lease, *, profiling: bool) -> m.LeaseTold:
    """One lease, for status."""
    return m.LeaseTold(
        id=lease.id,
        client=lease.client,
        pid=lease.pid,
        mode=Mode(lease.mode),
        generation=lease.generation,
        profiling=profiling,
    )


def divided(settings: RankSettings, others: Sequence[str]) -> str:
    """That these have weights of another checkpoint than this rank, and what to do."""
    group = settings.group
    return (
        f"of the group {group}, {', '.join(others)} and {settings.instance} have weights of "
        "different checkpoints, for its files have changed in between: run `preloadctl release "
        f"{group}`, then `preloadctl load {group}`; or put the files of before back and restart "
        "the ranks that have loaded others"
    )
