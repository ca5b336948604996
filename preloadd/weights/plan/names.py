"""Tensor names taken apart: which layer, which expert, and the name by which rules know it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_LAYER = re.compile(rf"model\.layers\.{_NUMBER}\.(.+)\Z", re.DOTALL)
_EXPERT = re.compile(rf"(.+\.experts)\.{_NUMBER}\.(.+)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where in the model a tensor is. `tail` is the name inside the layer, with `*` for the expert.

    Outside of layers `layer` is None and `tail` the whole name.
    """

    tail: str
    layer: int | None = None
    expert: int | None = None

    @property
    def of_experts(self) -> bool:
        """Whether this is a tensor of one expert, or of all experts of a layer together."""
        return ".experts." in self.tail


def locate(name: str) -> Spot:
    """The spot that `name` means."""
    in_layer = _LAYER.match(name)
    if not in_layer:
        return Spot(name)
    layer, tail = int(in_layer[1]), in_layer[2]
    of_expert = _EXPERT.match(tail)
    if not of_expert:
        return Spot(tail, layer)
    return Spot(f"{of_expert[1]}.*.{of_expert[3]}", layer, int(of_expert[2]))
