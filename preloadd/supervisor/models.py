"""The bodies of answers over HTTP. Values become these in `of` and nowhere else.

Sizes are bytes, names that end in `_seconds` are seconds; both are numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from preloadd.domain.lifecycle import State
from preloadd.supervisor import verdict as v
from preloadd.supervisor.devices import Device
from preloadd.supervisor.history import Happening
from preloadd.supervisor.lookout import View
from preloadd.supervisor.nodes import NodeGroup, Peer

Condition = Annotated[
    str,
    Field(
        description="what to show: the state that the rank told; where it did not answer, that "
        "which the service manager tells, else `absent`, `stuck` or `faulty`",
        json_schema_extra={"enum": list(v.CONDITIONS)},
    ),
]
Reasons = Annotated[
    tuple[str, ...], Field(description="one line for each rank that does not serve")
]
Instance = Annotated[str, Field(description="device and role, such as `GPU-….draft`")]
GroupName = Annotated[str, Field(description="empty while no rank has told it")]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(frozen=True)


class Alive(Body):
    """The supervisor itself runs."""

    alive: Literal[True] = True


class Ready(Body):
    """Whether every rank serves."""

    ready: bool
    reasons: Reasons


class EngineTold(Body):
    """An engine that holds a lease on this rank's weights."""

    client: Annotated[str, Field(description="what the engine calls itself")]
    pid: int
    mode: Annotated[str, Field(description="`zero_copy` or `copy`")]


class UnitTold(Body):
    """The rank's service, in systemd's words."""

    name: str
    active_state: str
    sub_state: str
    result: str
    status: Annotated[str, Field(description="the service's own status line")]
    restarts: Annotated[int, Field(description="automatic restarts so far")]


class RankTold(Body):
    """One rank. A stuck rank keeps the facts of its last answer."""

    group: GroupName
    instance: Instance
    device: Annotated[str, Field(description="the GPU's UUID, or `CPU-n` for host memory")]
    role: Annotated[str, Field(description="`target` or `draft`")]
    condition: Condition
    state: Annotated[State | None, Field(description="what the rank told; null if it did not")]
    problem: Annotated[str, Field(description="why there is no proper answer; else empty")]
    detail: Annotated[
        str,
        Field(description="why it does not serve; of a rank that serves, what its weights risk"),
    ]
    divided: Annotated[
        str, Field(description="why engines get nothing, though it serves: others have other files")
    ]
    pid: int
    version: Annotated[str, Field(description="of preloadd, as it runs in the rank")]
    model: str
    backend: str
    builder: str
    generation: str
    adopted: Annotated[bool, Field(description="whether the weights outlived an earlier daemon")]
    tensors: int
    tensor_bytes: int
    arena_bytes: Annotated[int, Field(description="allocated for the weights")]
    chunks: int
    phase: Annotated[str, Field(description="what a load does now; empty: there is none")]
    done: Annotated[int, Field(description="bytes of this phase of the load that are done")]
    total: Annotated[int, Field(description="bytes of this phase in all; 0: none, or unknown")]
    loads: Annotated[int, Field(description="by this daemon process")]
    bytes_read: Annotated[int, Field(description="from checkpoints, by this daemon process")]
    uptime_seconds: float
    ready_seconds: Annotated[float, Field(description="from the daemon's start until it served")]
    ask_seconds: Annotated[float, Field(description="that the last answer took")]
    age_seconds: Annotated[float | None, Field(description="since the last answer; null: none")]
    lease_count: int
    engines: Annotated[tuple[EngineTold, ...], Field(description="at most 128 are told")]
    unit: Annotated[UnitTold | None, Field(description="null where systemd is not asked")]

    @classmethod
    def of(cls, rank: v.Snapshot) -> Self:
        """The body for one rank."""
        told = asdict(rank)
        seconds = {f"{name}econds": told.pop(name) for name in _SECONDS}
        return cls(**told, **seconds, condition=rank.condition)


_SECONDS = ("uptime_s", "ready_s", "ask_s", "age_s")


class GroupTold(Body):
    """One model on this host."""

    name: GroupName
    healthy: bool
    reasons: Reasons
    models: Annotated[tuple[str, ...], Field(description="as the ranks were told them")]
    ranks: Annotated[tuple[str, ...], Field(description="the instances")]
    serving: Annotated[int, Field(description="how many ranks serve")]
    tensor_bytes: int
    arena_bytes: int
    lease_count: int

    @classmethod
    def of(cls, group: v.Group) -> Self:
        """The body for one group."""
        return cls(
            name=group.name,
            healthy=group.verdict.healthy,
            reasons=group.verdict.reasons,
            models=group.models,
            ranks=tuple(rank.instance for rank in group.ranks),
            serving=group.serving,
            tensor_bytes=sum(rank.tensor_bytes for rank in group.ranks),
            arena_bytes=sum(rank.arena_bytes for rank in group.ranks),
            lease_count=sum(rank.lease_count for rank in group.ranks),
        )


class LeaseTold(EngineTold):
    """One engine's hold on one rank's weights."""

    id: str
    generation: str
    group: GroupName
    instance: Instance


class DeviceTold(Body):
    """One GPU, or the host's memory. Null is what the driver does not tell."""

    id: Annotated[str, Field(description="the GPU's UUID, or `host`")]
    name: str
    memory_used: int | None
    memory_total: int | None
    ecc_corrected: Annotated[int | None, Field(description="errors since the driver was loaded")]
    ecc_uncorrected: Annotated[int | None, Field(description="errors since the driver was loaded")]
    xids: Annotated[
        dict[int, int], Field(description="Xid numbers met since the supervisor began, with counts")
    ]
    persistence: Annotated[
        bool | None, Field(description="whether the driver keeps a GPU that no process has open")
    ]
    problem: str

    @classmethod
    def of(cls, device: Device) -> Self:
        """The body for one device."""
        return cls(**{**asdict(device), "xids": dict(device.xids)})


class EventTold(Body):
    """One thing that happened to a rank while the supervisor looked."""

    at: datetime
    group: GroupName
    instance: Instance
    condition: Condition
    text: str

    @classmethod
    def of(cls, happening: Happening) -> Self:
        """The body for one happening."""
        return cls(**{**asdict(happening), "at": datetime.fromtimestamp(happening.at, UTC)})


class PeerRankTold(Body):
    """A rank of another node."""

    instance: Instance
    condition: Annotated[str, Field(description="that node's word, as in its `/v1/ranks`")]


class PeerGroupTold(Body):
    """The ranks of one model on another node."""

    name: GroupName
    serving: Annotated[int, Field(description="how many ranks serve")]
    ranks: tuple[PeerRankTold, ...]

    @classmethod
    def of(cls, group: NodeGroup) -> Self:
        """The body for one group."""
        ranks = tuple(PeerRankTold(**asdict(rank)) for rank in group.ranks)
        return cls(name=group.name, serving=group.serving, ranks=ranks)


class PeerTold(Body):
    """Another node, by what its supervisor told last. Nothing here decides how this node is."""

    address: Annotated[str, Field(description="as it was configured")]
    reachable: bool
    problem: Annotated[str, Field(description="why it does not answer; else empty")]
    age_seconds: Annotated[float | None, Field(description="since it told this; null: never")]
    host: Annotated[str, Field(description="what that node calls itself")]
    version: Annotated[str, Field(description="of its supervisor")]
    healthy: Annotated[bool | None, Field(description="its own verdict; null: not known")]
    reasons: Annotated[tuple[str, ...], Field(description="its reasons, the first few")]
    groups: tuple[PeerGroupTold, ...]

    @classmethod
    def of(cls, peer: Peer, group: str | None) -> Self:
        """The body for one node, with all of its groups, or the one that is named."""
        node = peer.node
        return cls(
            address=peer.address,
            reachable=peer.reachable,
            problem=peer.problem,
            age_seconds=peer.age_s,
            host=node.host if node else "",
            version=node.version if node else "",
            healthy=node.healthy if node else None,
            reasons=node.reasons if node else (),
            groups=tuple(PeerGroupTold.of(g) for g in peer.groups if group in (None, g.name)),
        )


class Peers(Body):
    """Every other node that is configured here."""

    peers: tuple[PeerTold, ...]

    @classmethod
    def of(cls, peers: Iterable[Peer], group: str | None) -> Self:
        """The body for all of them; see `PeerTold`."""
        return cls(peers=tuple(PeerTold.of(peer, group) for peer in peers))


class Ranks(Body):
    """Every rank."""

    ranks: tuple[RankTold, ...]


class Groups(Body):
    """Every group."""

    groups: tuple[GroupTold, ...]


class Leases(Body):
    """Every lease that was told; a rank tells 128 at most."""

    leases: tuple[LeaseTold, ...]

    @classmethod
    def of(cls, ranks: Iterable[v.Snapshot]) -> Self:
        """The leases of all ranks."""
        return cls(
            leases=tuple(
                LeaseTold(**asdict(engine), group=rank.group, instance=rank.instance)
                for rank in ranks
                for engine in rank.engines
            )
        )


class Devices(Body):
    """Every device that somebody can tell of."""

    devices: tuple[DeviceTold, ...]


class Events(Body):
    """The last events, newest first."""

    events: tuple[EventTold, ...]


class Health(Body):
    """The verdict, and all that it rests on."""

    healthy: bool
    reasons: Reasons
    trouble: Annotated[
        str,
        Field(
            description="what is wrong with the configuration, and what else tells nothing: a line "
            "for each; else empty"
        ),
    ]
    groups: tuple[GroupTold, ...]
    ranks: tuple[RankTold, ...]

    @classmethod
    def of(cls, view: View) -> Self:
        """The body for everything."""
        verdict = v.judge(view.ranks)
        return cls(
            healthy=verdict.healthy,
            reasons=verdict.reasons,
            trouble=view.troubles,
            groups=tuple(map(GroupTold.of, v.groups(view.ranks))),
            ranks=tuple(map(RankTold.of, view.ranks)),
        )
