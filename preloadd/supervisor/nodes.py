"""Other nodes, as far as they are known here. Pure: nothing is asked here."""

from __future__ import annotations

from dataclasses import dataclass

from preloadd.domain.lifecycle import State

MAX_RANKS = 1024
"""Ranks of one node that are watched and told of."""

LONGEST = 300
"""Characters of a text that another node may have shown here."""


@dataclass(frozen=True, slots=True)
class NodeRank:
    """A rank of another node; `condition` is that node's word for how it is."""

    instance: str
    condition: str

    @property
    def serving(self) -> bool:
        """Whether it serves, by what its node said."""
        return self.condition == State.SERVING


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The ranks of one model on one node. `name` is '' where no rank has told it."""

    name: str
    ranks: tuple[NodeRank, ...]

    @property
    def serving(self) -> int:
        """How many of them serve."""
        return sum(rank.serving for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class Node:
    """What a supervisor tells others of its node: never anything of nodes that it knows of.

    `identity` is another for every supervisor process. `reasons` may be cut.
    """

    identity: str
    host: str
    version: str
    healthy: bool
    reasons: tuple[str, ...]
    groups: tuple[NodeGroup, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node as it is known here, by the address that was configured.

    `node` is what it told last, `age_s` seconds ago; both are None if it never did. `problem` says
    why it does not tell now; empty if it does.
    """

    address: str
    node: Node | None = None
    age_s: float | None = None
    problem: str = ""

    @property
    def reachable(self) -> bool:
        """Whether it answered when it was asked last."""
        return not self.problem

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The groups that it told of last."""
        return () if self.node is None else self.node.groups


def shown(text: str) -> str:
    """`text`, which others have written, without what is not to be seen, and not long."""
    cut = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)
