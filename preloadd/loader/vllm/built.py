"""What building a model leaves for storing it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded model; its outline and names of tensors are those it had before its weights."""

    model: nn.Module
    outline: str
    names: frozenset[str]
