"""The arithmetic of a tensor-parallel cut: which spans of an axis a rank holds, and what fits."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from preloadd.domain.placement import Placement
from preloadd.errors import CheckpointError
from preloadd.weights.plan.dimensions import Dimensions
from preloadd.weights.plan.families import Rule, Unit

Count = tuple[Unit, int]
"""How many of a unit there are in the whole model."""

_MOST_RANKS = 256
"""Up to where sizes that fit are looked for."""


def spans(
    rule: Rule, name: str, shape: tuple[int, ...], dims: Dimensions, placement: Placement
) -> Iterator[range]:
    """What the rank holds along `rule.axis`, one span for each part of a fused tensor."""
    start = 0
    ranks, rank = placement.parallel.tensor, placement.tensor_rank
    for (unit, count), length in _parts(rule, name, shape, dims):
        shares, share = ranks, rank
        if unit is Unit.KV_HEADS and count < ranks:
            # Neighbouring ranks hold the same head: their query heads are the ones it serves.
            shares, share = count, rank // (ranks // count)
        width = length // shares
        yield range(start + share * width, start + (share + 1) * width)
        start += length


def counts(rule: Rule, name: str, shape: tuple[int, ...], dims: Dimensions) -> Iterator[Count]:
    """What has to divide for `spans` to be right."""
    for count, _ in _parts(rule, name, shape, dims):
        yield count


def uneven(found: Collection[Count], ranks: int) -> list[str]:
    """What does not divide by `ranks`, as one line of text each, in the order of `Unit`."""
    return [
        f"{count} {unit} do not divide by {ranks} tensor-parallel ranks"
        for unit in Unit
        for count in sorted(count for each, count in found if each is unit)
        if not _fits(unit, count, ranks)
    ]


def fitting(found: Collection[Count]) -> list[int]:
    """The tensor-parallel sizes that divide everything found, 1 among them."""
    most = min((count for unit, count in found if unit is not Unit.KV_HEADS), default=1)
    return [n for n in range(1, min(most, _MOST_RANKS) + 1) if not uneven(found, n)]


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
