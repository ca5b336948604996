"""The part of the status page about other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from preloadd.supervisor.lookout import View
from preloadd.supervisor.markup import Child, Html, tag
from preloadd.supervisor.nodes import NodeGroup, NodeRank, Peer
from preloadd.supervisor.panels import BAD, BUSY, GOOD, ago, tone

GROUPS_SHOWN = 8


def nodes(view: View) -> Html | None:
    """Every other node; None where none is configured."""
    if not view.peers:
        return None
    answering = sum(peer.reachable for peer in view.peers)
    about = f"{answering} of {len(view.peers)} answer · no part of the verdict above"
    return tag(
        "section",
        tag("div", tag("h2", "Other nodes"), tag("p", about, class_="about"), class_="title"),
        tag("ul", map(_node, view.peers), class_="nodes"),
        class_="card",
    )


def _node(peer: Peer) -> Html:
    colour, word = _verdict(peer)
    return tag(
        "li",
        tag(
            "div",
            tag("h3", (peer.node.host if peer.node else "") or peer.address),
            tag("p", " · ".join(_facts(peer)), class_="facts"),
            class_="who",
        ),
        tag("p", tag("span", word, class_=f"badge {colour}")),
        tag("div", _groups(peer), class_="holds"),
        [tag("p", why, class_="why") for why in _reasons(peer)],
        class_=None if peer.reachable else "silent",
        id=f"node-{peer.address}",
    )


def _verdict(peer: Peer) -> tuple[str, str]:
    if not peer.reachable or peer.node is None:
        return BAD, "no answer"
    if peer.node.healthy:
        return GOOD, "healthy"
    return _worst(rank for group in peer.groups for rank in group.ranks), "unhealthy"


def _worst(ranks: Iterable[NodeRank]) -> str:
    tones = {tone(rank.condition) for rank in ranks}
    return BAD if BAD in tones or not tones else BUSY if BUSY in tones else GOOD


def _facts(peer: Peer) -> Iterator[str]:
    if peer.node is not None:
        yield peer.address
        yield f"preloadd {peer.node.version}"
    yield "never heard" if peer.age_s is None else f"heard {ago(peer.age_s)} ago"


def _groups(peer: Peer) -> Child:
    """Which models are there, with ranks that serve of all; what is old is told as such."""
    if peer.node is None:
        return tag("p", "nothing known", class_="caption none")
    if not peer.groups:
        return tag("p", "no group", class_="caption none")
    more = len(peer.groups) - GROUPS_SHOWN
    return [
        tag("ul", map(_group, peer.groups[:GROUPS_SHOWN]), aria_label="Groups"),
        tag("p", f"and {more:,} more", class_="caption") if more > 0 else None,
    ]


def _group(group: NodeGroup) -> Html:
    return tag(
        "li",
        tag("span", class_=f"dot {_worst(group.ranks)}", aria_hidden="true"),
        tag("b", group.name or "(group unknown)"),
        tag("span", f"{group.serving} of {len(group.ranks)} serving"),
    )


def _reasons(peer: Peer) -> tuple[str, ...]:
    if peer.problem:
        return (peer.problem,)
    return peer.node.reasons if peer.node else ()
