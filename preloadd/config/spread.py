"""How a group is spread over ranks and nodes: what flags and files can say, and what follows.

The names are vLLM's, so that a daemon is told what its engine is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from preloadd.config.files import shortened
from preloadd.config.strict import MAX_RANKS, MAX_WORLD, Size
from preloadd.domain.ids import DeviceId, Instance, Role
from preloadd.domain.launch import SIZES, Launch, Misfit, world_told
from preloadd.domain.lines import one_line
from preloadd.domain.meeting import port_faults
from preloadd.domain.nodes import Node, launch_faults, plan_node
from preloadd.domain.placement import ExpertPlacement, Parallel, drafting
from preloadd.domain.settings import Rendezvous

NOTHING: Mapping[str, int] = MappingProxyType({})

BLOCKS = frozenset(
    (
        *(*SIZES, "nnodes", "node_rank"),
        *("data_parallel_size_local", "data_parallel_start_rank"),
    )
)
"""The settings that tell which ranks are on a node."""

_ADDRESSES = frozenset(("master_addr", "data_parallel_address"))


def once(value: object) -> object:
    """What a command line said several times, a tuple, if it was the same."""
    if not isinstance(value, tuple):
        return value
    said = {str(each): each for each in value}
    if len(said) > 1:
        told = " and ".join(shortened(one_line(each)) or "''" for each in said)
        raise ValueError(f"is given with different values, {told}: keep one")
    return next(iter(said.values()))


Once = BeforeValidator(once)

_Size = Annotated[Size, Once]
_Number = Annotated[int | None, Once]
_Address = Annotated[str, Once]
_Port = Annotated[int | None, Field(ge=1, le=65535), Once]


class Spread(BaseModel):
    """Sizes of a group, which of its ranks are on this node, and where all of them meet."""

    tensor_parallel_size: _Size = 1
    pipeline_parallel_size: _Size = 1
    data_parallel_size: _Size = 1
    enable_expert_parallel: Annotated[bool, Once] = False
    expert_placement_strategy: Annotated[Literal["linear", "round_robin"], Once] = "linear"
    nnodes: _Number = None
    node_rank: _Number = None
    data_parallel_size_local: _Number = None
    data_parallel_start_rank: _Number = None
    master_addr: _Address = ""
    data_parallel_address: _Address = ""
    weight_cache_master_port: _Number = None
    weight_cache_draft_master_port: _Number = None
    master_port: _Port = None
    data_parallel_rpc_port: _Port = None

    @property
    def parallel(self) -> Parallel:
        """The sizes as a value."""
        return Parallel(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            data=self.data_parallel_size,
            expert=self.enable_expert_parallel,
            expert_placement=ExpertPlacement(self.expert_placement_strategy),
        )

    def launch(
        self,
        devices: Sequence[str] | None = None,
        *,
        drafts: bool = False,
        others: Mapping[str, int] = NOTHING,
        seed_ports: tuple[int | None, int | None] = (None, None),
    ) -> Launch:
        """What this node is told, with its `devices` if those are known; see `Launch`.

        `seed_ports` are the first at which its ranks are asked, and at which they ask.
        """
        return Launch(
            parallel=self.parallel,
            devices=None if devices is None else tuple(map(DeviceId, devices)),
            drafts=drafts,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            data_parallel_size_local=self.data_parallel_size_local,
            data_parallel_start_rank=self.data_parallel_start_rank,
            data_parallel_address=self.data_parallel_address,
            master_addr=self.master_addr,
            weight_cache_master_port=self.weight_cache_master_port,
            weight_cache_draft_master_port=self.weight_cache_draft_master_port,
            master_port=self.master_port,
            data_parallel_rpc_port=self.data_parallel_rpc_port,
            others=others,
            seed_listen_port=seed_ports[0],
            seed_source_port=seed_ports[1],
        )


def spread_faults(launch: Launch, unknown: frozenset[str] = frozenset()) -> list[Misfit]:
    """All that is wrong with what a node is told, what is too much of it included.

    Of settings that are `unknown`, since they have a fault of their own, nothing is told, nor what
    would follow from them.
    """
    if unknown & BLOCKS:
        return certain(port_faults(launch), unknown)
    # The one stands in for the other.
    return certain(
        _spread_faults(launch), unknown | (_ADDRESSES if unknown & _ADDRESSES else set())
    )


def certain(misfits: Iterable[Misfit], unknown: frozenset[str]) -> list[Misfit]:
    """Those that are so whatever the settings are that are `unknown`."""
    return [one for one in misfits if unknown.isdisjoint((one.setting, *one.beside))]


def _spread_faults(launch: Launch) -> list[Misfit]:
    if launch.parallel.world > MAX_WORLD:
        text = f"makes {world_told(launch.parallel)}, but a group has at most {MAX_WORLD}"
        return [Misfit("tensor_parallel_size", f"{text}: give smaller sizes", SIZES)]
    if faults := launch_faults(launch):
        return faults
    node = plan_node(launch)
    return [*_crowded(launch, node), *_apart(node)]


def rendezvous(node: Node, instance: Instance) -> Rendezvous | None:
    """Where a rank of `node` meets the others of its role; None if all of these are on the node."""
    rank, port = node.placement_on(instance.device).rank, node.meeting.port
    everybody: Sequence[int] = range(node.parallel.world)
    if instance.role is Role.DRAFT:
        everybody, port = drafting(node.parallel), node.meeting.draft_port
    if port is None or set(everybody) <= set(node.ranks):
        return None
    return Rendezvous(
        address=node.meeting.address.strip("[]"),
        port=port,
        rank=everybody.index(rank),
        world=len(everybody),
        node=node.number if node.counted else 0,
        nodes=node.count if node.counted else 0,
        role=instance.role,
    )


def _crowded(launch: Launch, node: Node) -> Iterator[Misfit]:
    here = node.ranks
    if len(here) > MAX_RANKS:
        setting = "data_parallel_size_local" if launch.spans and not launch.by_nodes else "nnodes"
        said = getattr(launch, setting)
        yield Misfit(
            setting,
            f"is {'not given' if said is None else said}, so this node has {len(here)} ranks "
            f"({here.start} to {here[-1]} of {world_told(launch.parallel)}), but one has at most "
            f"{MAX_RANKS}: use more nodes",
            SIZES,
        )


def _apart(node: Node) -> Iterator[Misfit]:
    """Of drafts that are on several nodes, but not on the first, whose address they would use."""
    each, ranks = len(node.ranks), drafting(node.parallel) if node.drafts else ()
    nodes = {rank // each for rank in ranks}
    # Who is told by replicas has whole ones, so that the first node has drafts.
    if len(nodes) > 1 and 0 not in nodes:
        yield Misfit(
            "pipeline_parallel_size",
            f"is {node.parallel.pipeline}, so ranks {ranks[0]} and up have the last layers and "
            f"drafts beside them, on several nodes, but not on the first, with ranks 0 to "
            f"{each - 1}, where drafts meet: leave the draft out, or let the first node hold a "
            "whole replica",
        )
