"""A checkpoint as the native builder divides it: what is in which file, and whether it can be done.

For those who do so, and for those who launch them and want to know before.
"""

from __future__ import annotations

from preloadd.domain.placement import Parallel, place
from preloadd.weights.checkpoint import Checkpoint, config_of
from preloadd.weights.plan import Source, select


def sources_of(checkpoint: Checkpoint) -> dict[str, Source]:
    """Where each tensor lies, by name; `file` counts the checkpoint's shards."""
    numbers = {shard.path: number for number, shard in enumerate(checkpoint.shards)}
    return {
        name: Source(
            file=numbers[stored.shard.path],
            dtype=stored.info.dtype,
            shape=stored.info.shape,
            start=stored.info.start,
            nbytes=stored.info.nbytes,
        )
        for name, stored in checkpoint.tensors.items()
    }


def prove_divisible(checkpoint: Checkpoint, parallel: Parallel) -> None:
    """Raise what would keep the ranks of a group from holding this checkpoint between them.

    UnsupportedModel, ConfigError and CheckpointError as of `select`, which name what it is.
    """
    with config_of(checkpoint.folder):
        select(sources_of(checkpoint), checkpoint.config, place(parallel, 0))
