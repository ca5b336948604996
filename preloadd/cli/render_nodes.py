"""What people see of a group on this node and on others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from preloadd.cli import render
from preloadd.cli.overview import Condition
from preloadd.cli.paper import Cell, Paper, Styled
from preloadd.cli.views import Everywhere, Node, NodeRank
from preloadd.cli.words import duration

_DIM = "dim"


def group(seen: Everywhere, paper: Paper) -> str:
    """Everything about the group here, one fact a line; elsewhere, one row a rank."""
    here = render.group(seen, paper)
    if not seen.groups:
        here = paper.lines([Styled("no rank of this group is on this node", "bold")]) + here
    if not seen.nodes:
        return here
    head = paper.lines(
        [Styled(f"other nodes, as the supervisor at {seen.supervisor} heard:", "bold")]
    )
    rows = [row for node in seen.nodes for row in _rows(node)]
    heads = ["NODE", "ADDRESS", "RANK", "STATE", "HEARD"]
    table = paper.table(heads, rows, whole=["STATE", "HEARD"])
    return here + head + table + paper.lines(_problems(seen.nodes))


def _rows(node: Node) -> Iterator[list[Cell]]:
    heard = "never" if node.age_s is None else f"{duration(node.age_s)} ago"
    for rank in node.ranks:
        yield [node.host or "-", node.address, rank.instance, _state(node, rank), heard]
    if not node.ranks:
        yield [node.host or "-", node.address, "-", Styled("unknown", _DIM), heard]


def _state(node: Node, rank: NodeRank) -> Cell:
    """What was heard last; of a node that is silent now, it may not hold any more."""
    if not node.reachable:
        return Styled(f"{rank.condition}?", _DIM)
    known = rank.condition in list(Condition)
    return Styled(rank.condition, render.style(Condition(rank.condition)) if known else "")


def _problems(nodes: Iterable[Node]) -> list[Cell]:
    return [
        Styled(f"{node.address}: {node.problem}", render.BAD)
        for node in nodes
        if not node.reachable
    ]
