"""What one node is told of a group that may stand on several, and the counts that follow.

A node is told in either of two ways where it stands. By `nnodes` and `node_rank`: each node has a
contiguous block of the group's ranks, all of one size. Or by `data_parallel_start_rank` and
`data_parallel_size_local`: so many whole replicas, from that one on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from preloadd.domain.ids import DeviceId
from preloadd.domain.placement import Parallel
from preloadd.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The settings of one node, named as their flags; None or '' is what nobody said.

    `devices` are those of this node, in the order of its ranks; None while nobody has looked.
    `master_port` and `data_parallel_rpc_port` are the engine's. `others` are ports that this node
    uses for something else, by what people call them. The two of seeding are the first of as many
    as there are ranks: here, and at a source.
    """

    parallel: Parallel
    devices: tuple[DeviceId, ...] | None = None
    drafts: bool = False
    nnodes: int | None = None
    node_rank: int | None = None
    data_parallel_size_local: int | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_address: str = ""
    master_addr: str = ""
    weight_cache_master_port: int | None = None
    weight_cache_draft_master_port: int | None = None
    master_port: int | None = None
    data_parallel_rpc_port: int | None = None
    others: Mapping[str, int] = field(default_factory=dict)
    seed_listen_port: int | None = None
    seed_source_port: int | None = None

    @property
    def by_nodes(self) -> bool:
        """Whether blocks are told by `nnodes`, and not by replicas."""
        return self.nnodes is not None and self.nnodes > 1

    @property
    def replicas(self) -> int:
        """How many replicas are this node's, where blocks are told by them."""
        local = self.data_parallel_size_local
        return self.parallel.data if local is None else local

    @property
    def spans(self) -> bool:
        """Whether other nodes have ranks of the group."""
        return self.by_nodes or 0 < self.replicas < self.parallel.data


SIZES = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
"""The settings that the number of ranks follows from."""


class Misfit(NamedTuple):
    """A setting of one node that cannot be as it is, named as its flag, with underscores.

    `text` says what is wrong with it and, behind the last colon and space, the remedy. It is as
    much about the settings `beside`, as far as somebody gave them.
    """

    setting: str
    text: str
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As those are told who gave flags."""
        return f"{flag(self.setting)}: {self.text}"

    @property
    def bracketed(self) -> str:
        """The text as those are told who wrote files: there the remedy stands in brackets."""
        what, _, remedy = self.text.rpartition(": ")
        return f"{what} ({remedy})"


def refusal(misfits: Iterable[Misfit]) -> ConfigError:
    """All of them as one error, a line for each, by the names of flags."""
    return ConfigError("\n".join(map(str, misfits)))


def flag(setting: str) -> str:
    """The flag of a field of `Launch`."""
    return "--gpus" if setting == "devices" else f"--{setting.replace('_', '-')}"


def replica_told(parallel: Parallel) -> str:
    """The arithmetic of one replica's ranks."""
    told = f"pipeline {parallel.pipeline} x tensor {parallel.tensor}"
    return f"{told} = {parallel.replica} ranks"


def here_told(parallel: Parallel, ranks: range) -> str:
    """One node's ranks, with the arithmetic of the group's."""
    whole = world_told(parallel)
    return f"the {len(ranks)} ranks of this node, {ranks.start} to {ranks[-1]} of {whole}"


def world_told(parallel: Parallel) -> str:
    """The arithmetic of the whole group's ranks."""
    return (
        f"data {parallel.data} x pipeline {parallel.pipeline} x tensor {parallel.tensor} = "
        f"{parallel.world} ranks"
    )
