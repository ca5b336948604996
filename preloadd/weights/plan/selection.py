"""What one rank holds of a checkpoint: pipeline stage, experts and tensor-parallel cut together.

Nothing is replicated or dropped on a guess: where a model is divided and a tensor is not
understood, the whole selection is refused. Data-parallel replicas hold the same, but for experts:
those they hold between them, as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from preloadd.domain.experts import held_as
from preloadd.domain.placement import Placement, Share, experts_of, layers_of
from preloadd.errors import CheckpointError, ConfigError, UnsupportedModel
from preloadd.weights.plan.dimensions import Dimensions, architecture, dimensions
from preloadd.weights.plan.division import Count, counts, fitting, spans, uneven
from preloadd.weights.plan.families import (
    ARCHITECTURES,
    EMBEDDING,
    HEAD,
    OUTSIDE_LAYERS,
    Family,
    Rule,
)
from preloadd.weights.plan.names import Spot, locate
from preloadd.weights.plan.slices import Slice, Source, cut, whole

_NAMES_TOLD = 5

_REPLICATED = Rule()


def select(
    tensors: Mapping[str, Source], config: Mapping[str, object], placement: Placement
) -> list[Slice]:
    """What the rank at `placement` holds, in the order of the files so that reads are sequential.

    `config` is config.json as parsed. Every rank of a group finds the same faults, so that one can
    be asked for all of them: UnsupportedModel when an architecture, quantisation or tensor cannot
    be divided, ConfigError listing every size that does not divide, CheckpointError when
    config.json and tensors contradict each other.
    """
    ordered = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start, item[0]))
    held = held_as(placement, config)
    if held.undivided:
        return [whole(name, source) for name, source in ordered]
    found = [_Found(name, locate(name), source) for name, source in ordered]
    division = _division(config, held, has_head="lm_head.weight" in tensors)
    division.prove(found)
    return list(division.slices(found))


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of the checkpoint and where in the model it is."""

    name: str
    spot: Spot
    source: Source


@dataclass(frozen=True, slots=True)
class _Division:
    """One model of a known family, divided as `placement` says, which is one of `held_as`."""

    architecture: str
    family: Family
    dims: Dimensions
    placement: Placement

    def prove(self, found: Sequence[_Found]) -> None:
        """Raise unless every tensor, on whichever rank, is understood and every size divides."""
        unknown = [tensor.name for tensor in found if not self._understands(tensor.spot)]
        if unknown:
            more = f" and {len(unknown) - _NAMES_TOLD} more" if len(unknown) > _NAMES_TOLD else ""
            raise UnsupportedModel(
                f"{', '.join(unknown[:_NAMES_TOLD])}{more}: no tensors of {self.architecture} as "
                "config.json describes it, so how to divide them is not known: "
                "use parallel sizes of 1"
            )
        for tensor in found:
            self._check_stack(tensor)
        faults = [*self._uneven(found), *self._misplaced()]
        if faults:
            raise ConfigError("\n".join(faults))

    def slices(self, found: Sequence[_Found]) -> Iterator[Slice]:
        """What this rank holds; only after `prove`."""
        stage = layers_of(self.placement, self.dims.layers)
        experts = experts_of(self.placement, self.dims.experts)
        for tensor in found:
            spot = tensor.spot
            if self._in_stage(spot, stage) and (spot.expert is None or spot.expert in experts):
                yield self._slice(tensor, experts)

    def _understands(self, spot: Spot) -> bool:
        """Layer and expert suffice where nothing is cut: so stages of quantised models load."""
        return self._has_place(spot) and (self._rule(spot) is not None or not self._cuts(spot))

    def _has_place(self, spot: Spot) -> bool:
        if spot.layer is None:
            return spot.tail.startswith((EMBEDDING, *HEAD))
        return spot.layer < self.dims.layers and (
            spot.expert is None or spot.expert < self.dims.experts
        )

    def _rule(self, spot: Spot) -> Rule | None:
        return (OUTSIDE_LAYERS if spot.layer is None else self.family.layer).get(spot.tail)

    def _cuts(self, spot: Spot) -> bool:
        """Whether this division cuts some tensors at spots like this, so that a rule is needed."""
        dealt = self.placement.parallel.expert and spot.expert is not None
        return not dealt and self._share(spot).ranks > 1

    def _share(self, spot: Spot) -> Share:
        """The rank's place among those that hold what is there between them."""
        return self.placement.expert_share if spot.of_experts else self.placement.tensor_share

    def _uneven(self, found: Sequence[_Found]) -> list[str]:
        counted = dict.fromkeys(count for tensor in found for count in self._counts(tensor))
        parallel = self.placement.parallel
        faults = uneven(counted, parallel)
        if faults:
            sizes = ", ".join(map(str, fitting(counted, parallel.data))) or "none"
            beside = f" beside data parallel size {parallel.data}" if parallel.data > 1 else ""
            faults.append(f"tensor parallel sizes that divide this model{beside}: {sizes}")
        return faults

    def _counts(self, tensor: _Found) -> Iterator[Count]:
        rule = self._rule(tensor.spot) or _REPLICATED
        if self._share(tensor.spot).ranks > 1 and not self._deals(tensor.spot, rule):
            yield from counts(rule, tensor.name, tensor.source.shape, self.dims)

    def _deals(self, spot: Spot, rule: Rule) -> bool:
        """Whether experts are dealt whole, which takes the place of cutting them."""
        return self.placement.parallel.expert and (spot.expert is not None or rule.stacked)

    def _check_stack(self, tensor: _Found) -> None:
        rule = self._rule(tensor.spot) or _REPLICATED
        if rule.stacked and tensor.source.shape[:1] != (self.dims.experts,):
            raise CheckpointError(
                f"{tensor.name} has shape {tensor.source.shape}, but config.json counts "
                f"{self.dims.experts} experts: config.json and shards are not of one model"
            )

    def _misplaced(self) -> Iterator[str]:
        if self.placement.parallel.expert:
            yield from self._undealt()
        try:
            layers_of(self.placement, self.dims.layers)
        except ConfigError as error:
            yield str(error)

    def _undealt(self) -> Iterator[str]:
        experts, parallel = self.dims.experts, self.placement.parallel
        if not experts:
            yield f"expert parallelism is on, but {self.architecture} has no experts: turn it off"
        elif experts < self.placement.expert_size:
            yield (
                f"{experts} experts cannot be dealt to {self.placement.expert_size} ranks "
                f"({parallel.tensor} tensor x {parallel.data} data): use at most {experts}, or "
                "turn expert parallelism off"
            )

    def _in_stage(self, spot: Spot, stage: range) -> bool:
        if spot.layer is not None:
            return spot.layer in stage
        last = stage.stop == self.dims.layers
        if spot.tail.startswith(EMBEDDING):
            return stage.start == 0 or (last and self.dims.tied)
        return last

    def _slice(self, tensor: _Found, experts: Sequence[int]) -> Slice:
        name, source = tensor.name, tensor.source
        rule = self._rule(tensor.spot) or _REPLICATED
        if self._deals(tensor.spot, rule):
            return self._dealt(tensor, rule, experts)
        share = self._share(tensor.spot)
        if rule.axis is None or share.ranks == 1:
            return whole(name, source)
        taken = spans(rule, name, source.shape, self.dims, share)
        return cut(name, source, rule.axis, taken)

    def _dealt(self, tensor: _Found, rule: Rule, experts: Sequence[int]) -> Slice:
        if not rule.stacked:
            return whole(tensor.name, tensor.source)
        return cut(tensor.name, tensor.source, 0, (range(n, n + 1) for n in experts))


def _division(config: Mapping[str, object], placement: Placement, *, has_head: bool) -> _Division:
    name = architecture(config)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{name or 'a model without architectures in config.json'} cannot be divided over "
            f"ranks: use parallel sizes of 1, or one of {', '.join(ARCHITECTURES)}"
        )
    parallel = placement.parallel
    if parallel.tensor > 1 or (parallel.data > 1 and not parallel.expert):
        _refuse_quantised(config, replicas=parallel.data > 1)
    family = ARCHITECTURES[name]
    dims = dimensions(config, family, has_head=has_head)
    return _Division(name, family, dims, placement)


def _refuse_quantised(config: Mapping[str, object], *, replicas: bool) -> None:
    quantisation = config.get("quantization_config")
    if not quantisation:
        return
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    dealt = ", its replicas with expert parallelism only" if replicas else ""
    raise UnsupportedModel(
        f"the checkpoint is quantised ({method or 'method not named'}): where packed values and "
        "scales may be cut depends on the method, so it loads at tensor parallel size 1 only"
        f"{dealt}"
    )
