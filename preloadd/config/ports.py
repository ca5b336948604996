"""Ports at which the groups of a host, their ranks and their engines, are reached: no two groups
may have the same one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from preloadd.config.engine import fault_in
from preloadd.config.files import Document, Fault
from preloadd.config.group import Group
from preloadd.config.seeding import seeding
from preloadd.domain.seeding import EVERYWHERE

_TARGET, _DRAFT = "parallel.weight_cache_master_port", "parallel.weight_cache_draft_master_port"
_MASTER, _RPC = "parallel.master_port", "parallel.data_parallel_rpc_port"
_SEEDING = "seed.listen_port"


class Claim(NamedTuple):
    """`key` says it, or the first of several. It is opened `here`, or else on another host."""

    key: str
    host: str
    number: int
    here: bool

    def collides(self, other: Claim) -> bool:
        """Whether both cannot be listened at. What engines do to each other is their own matter."""
        if self.number != other.number or {self.key, other.key} <= {_MASTER, _RPC}:
            return False
        hosts = {self.host, other.host}
        everywhere = self.here and other.here and not hosts.isdisjoint(EVERYWHERE)
        return len(hosts) == 1 or everywhere


def ports_of(group: Group) -> Iterator[Claim]:
    """The ports of a group on its first node, and those at which ranks of this host are asked. Of
    the engine's there are those that somebody said."""
    node, sizes = group.node, group.parallel
    met, first = node.meeting, 0 in node.ranks
    if node.count > 1:
        for key, number in ((_TARGET, met.port), (_DRAFT, met.draft_port)):
            if number is not None:
                yield Claim(key, met.address, number, first)
    for key, number in ((_MASTER, sizes.master_port), (_RPC, sizes.data_parallel_rpc_port)):
        if number is not None:
            yield Claim(key, EVERYWHERE[0] if first else met.address, number, first)
    for instance in node.instances:
        found = seeding(group.seed, node, instance)
        if found is not None and found.listen is not None:
            yield Claim(_SEEDING, found.listen.host, found.listen.port, here=True)


def port_faults(groups: Iterable[tuple[Document, Group]]) -> Iterator[Fault]:
    """The keys that give a group a port of one before it."""
    taken: list[tuple[Claim, Document]] = []
    for document, group in groups:
        mine = [*ports_of(group)]
        found: dict[str, tuple[Claim, Claim, Document]] = {}
        for other, first in taken:
            for port in mine:
                if port.collides(other):
                    found.setdefault(port.key, (port, other, first))
        for port, other, first in found.values():
            verb = "gives a rank" if port.key == _SEEDING else "is"
            there = fault_in(first, other.key, "")
            text = f"{verb} {port.number}, which {there.key} of {there.origin} uses"
            yield fault_in(document, port.key, f"{text} (give another one)")
        taken += [(port, document) for port in mine]
