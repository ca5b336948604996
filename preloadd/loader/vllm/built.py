"""What building a model leaves for storing it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from preloadd.frameworks.vllm.walk import Plain


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded model; its outline and names of tensors are those it had before its weights. `state`
    are the plain values that processing has set or changed."""

    model: nn.Module
    outline: str
    names: frozenset[str]
    state: dict[str, Plain] = field(default_factory=dict)
