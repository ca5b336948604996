"""Which ranks of a group one node launches, on which of its devices, and where all of them meet.

The answers are those by which vLLM's engines place their workers when told the same; what these
could not start with is refused, and so is what two nodes could not agree on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from preloadd.domain.ids import DeviceId, Instance
from preloadd.domain.launch import (
    SIZES,
    Launch,
    Misfit,
    here_told,
    refusal,
    replica_told,
    world_told,
)
from preloadd.domain.meeting import Meeting, meeting_faults, meeting_of
from preloadd.domain.placement import Parallel, Placement, drafting, instances, place


@dataclass(frozen=True, slots=True)
class Node:
    """What one node launches: the global `ranks`, one on each of `devices` (none while unknown).

    `number` of `count` is which node it is if all have as many ranks as this one; without `nnodes`
    nobody knows that of the others (`counted` is false), but there are some if `count` is more
    than 1.
    """

    parallel: Parallel
    ranks: range
    number: int
    count: int
    counted: bool
    devices: tuple[DeviceId, ...]
    drafts: bool
    meeting: Meeting

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The coordinates of every rank here, in the order of devices."""
        return tuple(place(self.parallel, rank) for rank in self.ranks)

    @property
    def drafting(self) -> tuple[int, ...]:
        """Those of its ranks that have a draft beside them."""
        return drafting(self.parallel, self.ranks) if self.drafts else ()

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The rank daemons of this node: its targets in their order, then its drafts."""
        return instances(self.devices, self.parallel, drafts=self.drafts, first=self.ranks.start)

    def placement_on(self, device: DeviceId) -> Placement:
        """The coordinates of the rank on one of `devices`."""
        return self.placements[self.devices.index(device)]


def plan_node(launch: Launch) -> Node:
    """What this node launches; ConfigError with a line for every fault."""
    if faults := launch_faults(launch):
        raise refusal(faults)
    ranks = block(launch)
    return Node(
        parallel=launch.parallel,
        ranks=ranks,
        number=ranks.start // len(ranks),
        count=-(-launch.parallel.world // len(ranks)),
        counted=launch.by_nodes,
        devices=(launch.devices or ())[: len(ranks)],
        drafts=launch.drafts,
        meeting=meeting_of(launch),
    )


def launch_faults(launch: Launch) -> list[Misfit]:
    """All that is wrong with what a node is told, setting by setting."""
    wrong_block = [*(_node_faults(launch) if launch.by_nodes else _replica_faults(launch))]
    ranks = None if wrong_block else block(launch)
    return [*wrong_block, *_device_faults(launch, ranks), *meeting_faults(launch, ranks)]


def block(launch: Launch) -> range:
    """The global ranks of a node; where its settings have faults, as far as they can be counted."""
    if launch.nnodes is not None and launch.by_nodes:
        each, number = launch.parallel.world // launch.nnodes, launch.node_rank or 0
        return range(number * each, (number + 1) * each)
    replica = launch.parallel.replica
    first = (launch.data_parallel_start_rank or 0) * replica
    return range(first, first + launch.replicas * replica)


def _node_faults(launch: Launch) -> Iterator[Misfit]:
    """Of blocks by `nnodes`."""
    nodes, number, parallel = launch.nnodes or 1, launch.node_rank, launch.parallel
    if number is None:
        text = f"must be given where nnodes is {nodes}: give 0 to {nodes - 1}"
        yield Misfit("node_rank", text, ("nnodes",))
    elif not 0 <= number < nodes:
        text = f"is {number}, but nnodes is {nodes}: give 0 to {nodes - 1}"
        yield Misfit("node_rank", text, ("nnodes",))
    each, left = divmod(parallel.world, nodes)
    if left:
        text = f"is {nodes}, but {world_told(parallel)}, and {parallel.world} / {nodes} leaves"
        text = f"{text} {left}: give a number that divides {parallel.world}"
        yield Misfit("nnodes", text, SIZES)
    elif each % parallel.replica and parallel.replica % each:
        yield Misfit(
            "nnodes",
            f"is {nodes}, so one has {parallel.world} / {nodes} = {each} ranks, but a replica has "
            f"{replica_told(parallel)}: let nodes hold whole replicas, or replicas whole nodes",
            SIZES,
        )
    elif number is not None and 0 <= number < nodes:
        yield from _contradictions(launch, range(number * each, (number + 1) * each))


def _contradictions(launch: Launch, ranks: range) -> Iterator[Misfit]:
    """Of blocks by `nnodes` with what is said of replicas besides."""
    replica = launch.parallel.replica
    implied = {
        "data_parallel_start_rank": ranks.start // replica,
        "data_parallel_size_local": max(len(ranks) // replica, 1),
    }
    for setting, value in implied.items():
        if (said := getattr(launch, setting)) not in (None, value):
            yield Misfit(
                setting,
                f"is {said}, but node {launch.node_rank} of {launch.nnodes} has ranks "
                f"{ranks.start} to {ranks[-1]}, {replica} to a replica, which makes it {value}: "
                "leave it out",
                ("node_rank", "nnodes", *SIZES),
            )


def _replica_faults(launch: Launch) -> Iterator[Misfit]:
    """Of blocks by replicas."""
    size, local, first = launch.parallel.data, launch.replicas, launch.data_parallel_start_rank
    if launch.nnodes is not None and launch.nnodes < 1:
        yield Misfit("nnodes", f"is {launch.nnodes}: give at least 1")
    if launch.node_rank:
        text = f"is {launch.node_rank}, but there is one node: leave it out, or give nnodes"
        yield Misfit("node_rank", text)
    if local < 1:
        text = f"is {local}: give at least 1, or launch nothing here"
        yield Misfit("data_parallel_size_local", text)
    if first is not None and not 0 <= first < size:
        text = f"is {first}, but data-parallel-size is {size}: give 0 to {size - 1}"
        yield Misfit("data_parallel_start_rank", text, ("data_parallel_size",))
    elif first is None and 0 < local < size:
        text = f"must be given where a node has {local} of {size} replicas"
        text = f"{text}: give the number of its first"
        beside = ("data_parallel_size_local", "data_parallel_size")
        yield Misfit("data_parallel_start_rank", text, beside)
    elif (first or 0) + local > size:
        yield Misfit(
            "data_parallel_size_local",
            f"reaches past the last replica, since data-parallel-start-rank {first or 0} + {local} "
            f"= {(first or 0) + local}, but data-parallel-size is {size}: give at most "
            f"{size - (first or 0)}",
            ("data_parallel_start_rank", "data_parallel_size"),
        )


def _device_faults(launch: Launch, ranks: range | None) -> Iterator[Misfit]:
    """Of the devices, whose number is judged only if that of the ranks is known."""
    if launch.devices is None:
        return
    twice = [device for device, times in Counter(launch.devices).items() if times > 1]
    if twice:
        text = "is there twice, but a device holds one rank: name it once"
        yield Misfit("devices", f"{', '.join(twice)} {text}")
    there = len(set(launch.devices))
    if ranks is not None and there < len(ranks):
        yield Misfit(
            "devices",
            f"{there} are too few for {here_told(launch.parallel, ranks)}: name "
            f"{len(ranks) - there} more, or change the sizes",
            SIZES,
        )
