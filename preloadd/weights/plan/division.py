"""The arithmetic of a cut: which spans of an axis a rank holds, and what fits."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from preloadd.domain.placement import Parallel, Share
from preloadd.errors import CheckpointError
from preloadd.weights.plan.dimensions import Dimensions
from preloadd.weights.plan.families import Rule, Unit

Count = tuple[Unit, int]
"""How many of a unit there are in the whole model."""

_MOST_RANKS = 256
"""Up to where sizes that fit are looked for."""


def spans(
    rule: Rule, name: str, shape: tuple[int, ...], dims: Dimensions, share: Share
) -> Iterator[range]:
    """What the rank holds along `rule.axis`, one span for each part of a fused tensor."""
    start = 0
    for (unit, count), length in _parts(rule, name, shape, dims):
        ranks, rank = share
        if unit is Unit.KV_HEADS and count < ranks:
            # Neighbouring ranks hold the same head: their query heads are the ones it serves.
            ranks, rank = count, rank // (ranks // count)
        width = length // ranks
        yield range(start + rank * width, start + (rank + 1) * width)
        start += length


def counts(rule: Rule, name: str, shape: tuple[int, ...], dims: Dimensions) -> Iterator[Count]:
    """What has to divide for `spans` to be right."""
    for count, _ in _parts(rule, name, shape, dims):
        yield count


def uneven(found: Collection[Count], parallel: Parallel) -> list[str]:
    """What does not divide by its ranks, as one line of text each, in the order of `Unit`.

    Replicas are not alone with what is of experts: all tensor ranks of all of them cut it.
    """
    return [
        f"{count} {unit} do not divide by {_told(unit, parallel)}"
        for unit in Unit
        for count in sorted(count for each, count in found if each is unit)
        if not _fits(unit, count, _ranks(unit, parallel))
    ]


def fitting(found: Collection[Count], data: int = 1) -> list[int]:
    """The tensor-parallel sizes that divide everything found, beside so many replicas; ascending.

    With one replica 1 is among them.
    """
    most = min((count for unit, count in found if unit is not Unit.KV_HEADS), default=1)
    sizes = range(1, min(most, _MOST_RANKS) + 1)
    return [size for size in sizes if not uneven(found, Parallel(tensor=size, data=data))]


def _ranks(unit: Unit, parallel: Parallel) -> int:
    return parallel.tensor * (parallel.data if unit is Unit.EXPERT else 1)


def _told(unit: Unit, parallel: Parallel) -> str:
    if unit is Unit.EXPERT and parallel.data > 1:
        sizes = f"{parallel.tensor} tensor x {parallel.data} data"
        return f"{_ranks(unit, parallel)} ranks ({sizes})"
    return f"{parallel.tensor} tensor-parallel ranks"


def _fits(unit: Unit, count: int, ranks: int) -> bool:
    if unit is Unit.KV_HEADS and count < ranks:
        return ranks % count == 0
    return count % ranks == 0


def _parts(
    rule: Rule, name: str, shape: tuple[int, ...], dims: Dimensions
) -> Iterator[tuple[Count, int]]:
    """The parts of the axis: how many units each has, and its length."""
    if rule.axis is None:
        return
    if rule.axis >= len(shape):
        raise CheckpointError(f"{name} has shape {shape}: expected at least {rule.axis + 1} axes")
    length = shape[rule.axis]
    heads = {Unit.HEADS: dims.heads, Unit.KV_HEADS: dims.kv_heads}
    each = length // len(rule.parts)
    sizes = [heads[unit] * dims.head_dim if unit in heads else each for unit in rule.parts]
    if sum(sizes) != length:
        raise CheckpointError(
            f"{name} is {length} long on axis {rule.axis}, but {_expected(rule, dims)}: "
            "config.json and shards are not of one model"
        )
    for unit, size in zip(rule.parts, sizes, strict=True):
        yield (unit, heads.get(unit, size)), size


def _expected(rule: Rule, dims: Dimensions) -> str:
    if not {Unit.HEADS, Unit.KV_HEADS} & set(rule.parts):
        return f"holds {len(rule.parts)} equal parts"
    return (
        f"config.json says {dims.heads} attention heads and {dims.kv_heads} key-value heads "
        f"of {dims.head_dim}"
    )
