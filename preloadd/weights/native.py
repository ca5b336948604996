"""A checkpoint as the native builder divides it: what is in which file, and whether it can be done.

For those who do so, and for those who launch them and want to know before.
"""

from __future__ import annotations

from pathlib import Path

from preloadd.domain.placement import Parallel, place
from preloadd.errors import PreloadError
from preloadd.weights.checkpoint import Checkpoint, config_of, open_checkpoint
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


def require_divisible(folder: Path, parallel: Parallel) -> None:
    """As `prove_divisible`, of the checkpoint in `folder`; for a checkpoint that cannot be read,
    the ranks are to complain of it."""
    try:
        checkpoint = open_checkpoint(folder)
    except PreloadError:
        return
    prove_divisible(checkpoint, parallel)


def prove_divisible(checkpoint: Checkpoint, parallel: Parallel) -> None:
    """Raise what would keep the ranks of a group from holding this checkpoint between them.

    UnsupportedModel, ConfigError and CheckpointError as of `select`, which name what it is.
    """
    with config_of(checkpoint.folder):
        select(sources_of(checkpoint), checkpoint.config, place(parallel, 0))
