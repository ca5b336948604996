"""What a node tells other nodes of itself over HTTP, and what is taken from such an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from preloadd.errors import ProtocolViolation
from preloadd.supervisor.nodes import MAX_RANKS, Node, NodeGroup, NodeRank, shown
from preloadd.supervisor.verdict import Snapshot, groups, judge

PATH = "/v1/node"

LIMIT = 1 << 19
"""Bytes of an answer: room for `MAX_RANKS` ranks with long names."""

MAX_REASONS = 8

Shown = Annotated[str, AfterValidator(shown)]


class RankIntroduced(BaseModel):
    """A rank, in two words."""

    model_config = ConfigDict(frozen=True)

    instance: Annotated[Shown, Field(description="device and role, such as `GPU-….draft`")]
    condition: Annotated[Shown, Field(description="as in `/v1/ranks`")]


class GroupIntroduced(BaseModel):
    """A group with its ranks on this node."""

    model_config = ConfigDict(frozen=True)

    name: Annotated[Shown, Field(description="empty while no rank has told it")]
    ranks: Annotated[tuple[RankIntroduced, ...], Field(max_length=MAX_RANKS)]


class NodeIntroduced(BaseModel):
    """This node in short, for the supervisors of others. Of its own peers nothing is told."""

    model_config = ConfigDict(frozen=True)

    identity: Annotated[Shown, Field(description="of this process: it may meet itself in a list")]
    host: Shown
    version: Annotated[Shown, Field(description="of the supervisor")]
    healthy: Annotated[bool, Field(description="whether every rank of this node serves")]
    reasons: Annotated[
        tuple[Shown, ...], Field(max_length=MAX_REASONS, description="why not: the first few lines")
    ]
    groups: Annotated[tuple[GroupIntroduced, ...], Field(max_length=MAX_RANKS)]

    @classmethod
    def of(cls, ranks: Iterable[Snapshot], *, identity: str, host: str, version: str) -> Self:
        """The body for a node with these ranks."""
        seen = tuple(ranks)
        verdict = judge(seen)
        return cls(
            identity=identity,
            host=host,
            version=version,
            healthy=verdict.healthy,
            reasons=verdict.reasons[:MAX_REASONS],
            groups=tuple(
                GroupIntroduced(
                    name=group.name,
                    ranks=tuple(
                        RankIntroduced(instance=rank.instance, condition=rank.condition)
                        for rank in group.ranks
                    ),
                )
                for group in groups(seen)
            ),
        )


def read(body: bytes) -> Node:
    """What another node told; ProtocolViolation says in our words what is wrong with it.

    What it tells beyond what is known here is passed over.
    """
    try:
        told = NodeIntroduced.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise ProtocolViolation(_wrong(error)) from error
    found = tuple(
        NodeGroup(g.name, tuple(NodeRank(r.instance, r.condition) for r in g.ranks))
        for g in told.groups
    )
    if len({group.name for group in found}) < len(found):
        raise ProtocolViolation("what it answers is not how a node is: it names a group twice")
    return Node(told.identity, told.host, told.version, told.healthy, told.reasons, found)


def _wrong(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    # Of what is no JSON, the message has the position; nowhere does it have the peer's own words.
    what = shown(f"{where}: {first['msg']}" if where else first["msg"])
    return f"what it answers is not how a node is: {what}"
