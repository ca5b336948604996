"""What config.json says of a model's experts, and what follows for the ranks that hold them.

Loader and engine both ask, of the same file, so that both see a rank in the same place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from preloadd.domain.placement import ExpertPlacement, Placement, as_reported

_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Names that architectures have for it; the first one that is there counts, whatever it says
(source: `ModelArchConfigConvertorBase.get_num_experts` of vLLM)."""

_GROUPS = "n_group"


def has_experts(config: Mapping[str, object]) -> bool:
    """Whether config.json counts experts, of all layers or of some."""
    text = _text(config)
    counted = next((text[name] for name in _COUNTS if name in text), None)
    if isinstance(counted, list):
        return any(counted[:1])
    blocks = text.get("block_configs")
    return bool(counted) or (isinstance(blocks, list) and any(map(_of_experts, blocks)))


def held_as(placement: Placement, config: Mapping[str, object]) -> Placement:
    """The coordinates that decide what a rank holds: without what means nothing to its model.

    Replicas of a model without experts are alone. Experts are dealt in turns only where that was
    asked for, the model has several groups of them, and no replicas share them; else in blocks.
    """
    seen = as_reported(placement, moe=has_experts(config))
    if _in_turns(seen, config):
        return seen
    parallel = replace(seen.parallel, expert_placement=ExpertPlacement.LINEAR)
    return replace(seen, parallel=parallel)


def _in_turns(placement: Placement, config: Mapping[str, object]) -> bool:
    """Source: `determine_expert_placement_strategy` of vLLM, with its backend by default for what
    replicas exchange."""
    parallel, groups = placement.parallel, _text(config).get(_GROUPS)
    return (
        parallel.expert
        and parallel.expert_placement is ExpertPlacement.ROUND_ROBIN
        and parallel.data == 1
        and isinstance(groups, int)
        and groups > 1
    )


def _of_experts(block: object) -> bool:
    if not isinstance(block, Mapping):
        return False
    return block.get("block_type") == "moe" and bool(block.get("n_routed_experts"))


def _text(config: Mapping[str, object]) -> Mapping[str, object]:
    """What a configuration of several models says of the one for text."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config
