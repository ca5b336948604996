"""What a rank tells of its weights, of leases, of differing keys, and of a divided group."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from preloadd.domain.key import Difference
from preloadd.domain.leases import Lease, Mode
from preloadd.domain.settings import RankSettings
from preloadd.protocol import messages as m
from preloadd.rank.generation import Generation

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


def with_weights(told: m.StatusTold, generation: Generation) -> m.StatusTold:
    """A status that also tells of the weights that are held."""
    manifest = generation.manifest
    return msgspec.structs.replace(
        told,
        generation=manifest.generation,
        tensors=len(manifest),
        tensor_bytes=manifest.nbytes,
        arena_bytes=generation.arena_nbytes,
        chunks=len(manifest.chunks),
        key=manifest.key,
        counters=told.counters
        | {f"generation_{name}": value for name, value in manifest.counters.items()},
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
