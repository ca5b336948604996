"""Where a rank stands in the group: parallel sizes, coordinates, experts and layers.

Order of ranks is vLLM's: data, pipeline, tensor, the last one fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from preloadd.domain.ids import DeviceId, Instance, Role
from preloadd.errors import ConfigError


class ExpertPlacement(StrEnum):
    """How experts are dealt to expert-parallel ranks: in blocks, or one after the other."""

    LINEAR = "linear"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True)
class Parallel:
    """The sizes of a group. Every size is at least 1; ConfigError lists those that are not."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    expert_placement: ExpertPlacement = ExpertPlacement.LINEAR

    def __post_init__(self) -> None:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        faults = [
            f"{name} parallel size is {size}: at least 1"
            for name, size in sizes.items()
            if size < 1
        ]
        if faults:
            raise ConfigError("\n".join(faults))

    @property
    def replica(self) -> int:
        """How many ranks hold one copy of the model, its experts set aside."""
        return self.tensor * self.pipeline

    @property
    def world(self) -> int:
        """How many ranks the whole group has."""
        return self.replica * self.data


class Share(NamedTuple):
    """One rank's place among the `ranks` that hold something between them."""

    ranks: int
    rank: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank's coordinates; ConfigError lists those outside of the group.

    The data x tensor ranks of a pipeline stage hold its experts between them: with expert
    parallelism each holds some of them, without it a part of every one. Of all else each replica
    has its own, which its tensor ranks hold between them.
    """

    parallel: Parallel
    tensor_rank: int = 0
    pipeline_rank: int = 0
    data_rank: int = 0

    def __post_init__(self) -> None:
        coordinates = {
            "tensor": (self.tensor_rank, self.parallel.tensor),
            "pipeline": (self.pipeline_rank, self.parallel.pipeline),
            "data": (self.data_rank, self.parallel.data),
        }
        faults = [
            f"{name} parallel rank is {rank}: expected 0 to {size - 1}"
            for name, (rank, size) in coordinates.items()
            if not 0 <= rank < size
        ]
        if faults:
            raise ConfigError("\n".join(faults))

    @property
    def rank(self) -> int:
        """The global rank: what `place` made the coordinates of."""
        stage = self.data_rank * self.parallel.pipeline + self.pipeline_rank
        return stage * self.parallel.tensor + self.tensor_rank

    @property
    def undivided(self) -> bool:
        """Whether this rank holds the whole model, and would if it had experts."""
        return self.parallel.world == 1

    @property
    def tensor_share(self) -> Share:
        """Its place among those that hold what is not of experts."""
        return Share(self.parallel.tensor, self.tensor_rank)

    @property
    def expert_share(self) -> Share:
        """Its place among those that hold the experts, whole ones or parts of each."""
        ranks, rank = self.tensor_share
        return Share(self.parallel.data * ranks, self.data_rank * ranks + rank)

    @property
    def expert_size(self) -> int:
        """Among how many ranks experts are dealt; 1 without expert parallelism."""
        return self.expert_share.ranks if self.parallel.expert else 1

    @property
    def expert_rank(self) -> int:
        """This rank's place among those that experts are dealt to."""
        return self.expert_share.rank if self.parallel.expert else 0


def place(parallel: Parallel, rank: int) -> Placement:
    """The coordinates of global rank `rank`; ConfigError if the group has no such rank."""
    if not 0 <= rank < parallel.world:
        last = parallel.world - 1
        raise ConfigError(f"the group has no rank {rank}: its ranks are 0 to {last}")
    rank, tensor_rank = divmod(rank, parallel.tensor)
    data_rank, pipeline_rank = divmod(rank, parallel.pipeline)
    return Placement(parallel, tensor_rank, pipeline_rank, data_rank)


def as_reported(placement: Placement, *, moe: bool) -> Placement:
    """The coordinates by which engines ask for the weights of this rank.

    Replicas of a dense model know nothing of each other: each is alone, and any may take the
    weights. With `moe` they share work, and each has its own. A draft goes by its target's kind.
    """
    if moe:
        return placement
    return replace(placement, parallel=replace(placement.parallel, data=1), data_rank=0)


def drafting(parallel: Parallel, ranks: range | None = None) -> tuple[int, ...]:
    """Those of the global `ranks`, of all without any, that have a draft beside them, ascending.

    A draft lies on the device of its target: beside every rank of the last pipeline stage, in each
    replica, and nowhere else (source: vLLM's model runners, which make a drafter and load its model
    if `get_pp_group().is_last_rank`). A whole group has data x tensor of them, and a draft's
    number among these is where its rank stands in the answer. Only the generator of systemd, which
    can import nothing, says this again; its tests compare.
    """
    last = parallel.pipeline - 1
    every = range(parallel.world) if ranks is None else ranks
    return tuple(rank for rank in every if rank // parallel.tensor % parallel.pipeline == last)


def instances(
    devices: Sequence[DeviceId], parallel: Parallel, *, drafts: bool, first: int = 0
) -> tuple[Instance, ...]:
    """The rank daemons on one node's devices, of which the n-th holds global rank `first` + n: its
    targets in order, then with `drafts` those of the draft model."""
    here = range(first, first + len(devices)) if drafts else range(0)
    beside = [devices[rank - first] for rank in drafting(parallel, here)]
    return (*map(Instance, devices), *(Instance(device, Role.DRAFT) for device in beside))


def peers(instance: Instance, group: Iterable[Instance]) -> tuple[str, ...]:
    """The ranks without which no engine can use this one: those that hold the rest of its model.

    Target and draft are asked for one after the other, and either of them may come from disk.
    """
    return tuple(str(p) for p in group if p.role is instance.role and p != instance)


def experts_of(placement: Placement, experts: int) -> Sequence[int]:
    """Global numbers of the experts this rank holds, ascending, dealt as its `Parallel` says: what
    a model makes of that, `domain.experts` knows.

    Rounds as vLLM does: under `linear` the first `experts % size` ranks hold one more.
    """
    size, rank = placement.expert_size, placement.expert_rank
    if placement.parallel.expert_placement is ExpertPlacement.ROUND_ROBIN:
        return range(rank, experts, size)
    each, more = divmod(experts, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def layers_of(placement: Placement, layers: int) -> range:
    """The layers of this pipeline stage; ConfigError if there are fewer layers than stages.

    Rounds as vLLM does: what does not divide goes to the last stages but one, backwards, because
    the last one also holds the head (source: `get_pp_indices` of vLLM's distributed utilities).
    """
    size, rank = placement.parallel.pipeline, placement.pipeline_rank
    if layers < size:
        raise ConfigError(
            f"{layers} layers do not make {size} pipeline stages: use at most {layers}"
        )
    each, more = divmod(layers, size)
    sizes = [each] * size
    for extra in range(more):
        sizes[-(extra + 2)] += 1
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])
