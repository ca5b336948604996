"""What commands besides `status` show, taken from an overview. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from preloadd.cli.exits import CommandFailed, Exit
from preloadd.cli.overview import Overview, select, told


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease and where it is."""

    group: str
    instance: str
    client: str
    pid: int
    mode: str
    generation: str


@dataclass(frozen=True, slots=True)
class Leases:
    """All leases that were told, how many there are, and why some may be missing."""

    total: int
    leases: tuple[LeaseRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit_status(self) -> Exit:
        """What `leases` ends with."""
        return Exit.NOT_SERVING if self.notes else Exit.DONE


@dataclass(frozen=True, slots=True)
class RunningVersion:
    """The version that a rank runs."""

    group: str
    instance: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed and what runs. `matches` if all that told a version run this one."""

    installed: str
    matches: bool
    ranks: tuple[RunningVersion, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRank:
    """A rank of another node; `condition` is that node's word for how it is."""

    instance: str
    condition: str


@dataclass(frozen=True, slots=True)
class Node:
    """Another node, by what its supervisor told this host's last, `age_s` seconds ago (or never).

    `problem` says why it does not tell now; empty if it does. `ranks` are those of one group.
    """

    address: str
    host: str = ""
    version: str = ""
    reachable: bool = False
    problem: str = ""
    age_s: float | None = None
    ranks: tuple[NodeRank, ...] = ()


@dataclass(frozen=True, slots=True)
class Everywhere(Overview):
    """One group: what is seen of it on this node, and what is heard of it on others.

    `supervisor` is the address of who told of other nodes; empty if nobody did.
    """

    supervisor: str = ""
    nodes: tuple[Node, ...] = ()


def everywhere(
    seen: Overview, name: str, nodes: Sequence[Node], *, supervisor: str = "", note: str = ""
) -> Everywhere:
    """The group `name` as `seen` here, and on those of `nodes` that have it or cannot tell.

    CommandFailed if nobody has it, with the nodes that may. `note` is why other nodes are not
    known, if they are not.
    """
    elsewhere = any(node.ranks for node in nodes) and name not in {g.name for g in seen.groups}
    try:
        here = replace(seen, healthy=False, groups=()) if elsewhere else select(seen, [name])
    except CommandFailed as error:
        silent = [f"{node.address} does not tell: {node.problem}" for node in nodes if node.problem]
        if not silent and not note:
            raise
        told_all = "; ".join([str(error), *silent, *filter(None, [note])])
        raise CommandFailed(told_all, Exit(error.exit_status)) from None
    return Everywhere(
        here.healthy,
        here.groups,
        (*here.notes, note) if note else here.notes,
        here.looked_in,
        supervisor,
        tuple(node for node in nodes if node.ranks or not node.reachable),
    )


def leases(seen: Overview) -> Leases:
    """Who holds weights."""
    rows = [
        LeaseRow(rank.group, rank.instance, e.client, e.pid, e.mode, e.generation)
        for rank in seen.ranks
        for e in rank.leases
    ]
    total = sum(rank.lease_count or 0 for rank in seen.ranks)
    unknown = tuple(f"not known: {told(rank)}" for rank in seen.ranks if rank.in_use is None)
    return Leases(total, tuple(rows), (*seen.notes, *unknown))


def versions(installed: str, seen: Overview) -> Versions:
    """What runs, against what is installed."""
    running = tuple(
        RunningVersion(rank.group, rank.instance, rank.pid, rank.version)
        for rank in seen.ranks
        if rank.version
    )
    return Versions(installed, all(rank.version == installed for rank in running), running)
