"""What config.json says of a model, as far as cutting it depends on that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from preloadd.errors import CheckpointError
from preloadd.weights.plan.families import Family

_EXPERT_KEYS = ("num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Counts, and the width of one attention head in rows of its projection; `experts` may be 0.

    `tied`: the last pipeline stage needs the input embedding too.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    tied: bool


def architecture(config: Mapping[str, object]) -> str:
    """The first name in `architectures`, or an empty string where config.json names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, (list, tuple)) and names else ""


def dimensions(config: Mapping[str, object], family: Family, *, has_head: bool) -> Dimensions:
    """The dimensions of a model of `family`; CheckpointError naming the key that is wrong.

    Without an output head of its own (`has_head`) a model can only use its input embedding.
    """
    heads = _count(config, "num_attention_heads")
    tied = config.get("tie_word_embeddings")
    return Dimensions(
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", heads),
        head_dim=_head_dim(config, heads),
        experts=_experts(config) if family.has_experts else 0,
        tied=not has_head or (family.tied if tied is None else bool(tied)),
    )


def _head_dim(config: Mapping[str, object], heads: int) -> int:
    if config.get("head_dim") is not None:
        return _count(config, "head_dim")
    hidden = _count(config, "hidden_size")
    width, rest = divmod(hidden, heads)
    if rest:
        raise CheckpointError(
            f"config.json: hidden_size {hidden} does not divide by num_attention_heads {heads}, "
            "and head_dim is not given"
        )
    return width


def _experts(config: Mapping[str, object]) -> int:
    given = [key for key in _EXPERT_KEYS if config.get(key) is not None]
    return _count(config, (given or _EXPERT_KEYS)[0])


def _count(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"config.json: {key} is {'missing' if value is None else repr(value)}: "
            "expected a whole number of at least 1"
        )
    return value
