"""How people are told of ranks that meet: which they are, and what to do where one is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from preloadd.domain.ids import Role
from preloadd.domain.settings import Rendezvous
from preloadd.protocol.codec import cut

TOLD = 2048
"""Characters of an explanation."""

NETWORK = "look at its host, and at the network between"


def ranks_named(ranks: Sequence[int], nodes: Iterable[int], role: str = Role.TARGET) -> str:
    """How ranks are named to people: 'ranks 3, 5 of nodes 1, 2', 'ranks 3, 5' where no node is
    known, and 'draft ranks 3, 5' those of a draft, which have numbers of their own."""
    noun = "draft rank" if role == Role.DRAFT else "rank"
    told, known = _counted(noun, ranks), sorted(set(nodes))
    return f"{told} of {_counted('node', known)}" if known else told


def missing_named(missing: Sequence[int], place: Rendezvous) -> str:
    """How ranks that nobody has heard of are named: 'ranks 3, 5 of nodes 1, 2'."""
    return ranks_named(missing, _nodes(missing, place), place.role)


def did_not_come(missing: Sequence[int], place: Rendezvous, patience: float) -> str:
    """That these are not there after `patience` seconds, and what to do; whoever they are."""
    who = missing_named(missing, place) if missing else "the others"
    return f"{who} did not come to {place.where} within {patience:g} s: {where_to_look(place)}"


def was_silent(silence: float) -> str:
    """What became of a rank of which nothing was heard for `silence` seconds: 'it …'."""
    return f"was silent for {silence:g} s: {NETWORK}"


def where_to_look(place: Rendezvous) -> str:
    """What to do where ranks do not find each other."""
    same = "address and port are the same on all nodes"
    if place.role is Role.DRAFT:
        same = f"all nodes hold the draft and have the same address and {place.setting}"
    return (
        f"see whether preloadd runs there and what its log says, whether {same}, and whether a "
        "firewall is between them"
    )


def printable(text: str) -> str:
    """`text` as it may be told and logged, whoever wrote it."""
    return cut(text, TOLD)


def _counted(noun: str, numbers: Sequence[int]) -> str:
    told = ", ".join(map(str, numbers[:16])) + (", …" if len(numbers) > 16 else "")
    return f"{noun}{'s' if len(numbers) != 1 else ''} {told}"


def _nodes(ranks: Iterable[int], place: Rendezvous) -> list[int]:
    """Where ranks are, if every node has as many; [] if nobody knows: they have not told either."""
    if not place.nodes:
        return []
    return [rank * place.nodes // place.world for rank in ranks]
