"""Other nodes as metrics. Of one that does not answer, what it told before is in none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from preloadd.supervisor.nodes import Peer

MOST_GROUPS = 64
"""Of one peer that become metrics: their names are its own words, and each is a series for good."""


def peer_metrics(peers: Iterable[Peer]) -> Iterator[Metric]:
    """Every metric of other nodes, each with all of its samples."""
    up = GaugeMetricFamily("preloadd_peer_up", "Whether the peer answers.", labels=["peer"])
    age = GaugeMetricFamily(
        "preloadd_peer_age_seconds", "Time since the peer's last answer.", labels=["peer"]
    )
    healthy = GaugeMetricFamily(
        "preloadd_peer_healthy", "Whether every rank of the peer serves.", labels=["peer"]
    )
    info = GaugeMetricFamily(
        "preloadd_peer_info", "What the peer says it is.", labels=["peer", "host", "version"]
    )
    ranks = GaugeMetricFamily(
        "preloadd_peer_group_ranks", "Ranks of the group there.", labels=["peer", "group"]
    )
    serving = GaugeMetricFamily(
        "preloadd_peer_group_ranks_serving", "Ranks that serve.", labels=["peer", "group"]
    )
    for peer in peers:
        up.add_metric([peer.address], peer.reachable)
        if peer.age_s is not None:
            age.add_metric([peer.address], peer.age_s)
        if peer.node is None or not peer.reachable:
            continue
        healthy.add_metric([peer.address], peer.node.healthy)
        info.add_metric([peer.address, peer.node.host, peer.node.version], 1)
        for group in peer.groups[:MOST_GROUPS]:
            ranks.add_metric([peer.address, group.name], len(group.ranks))
            serving.add_metric([peer.address, group.name], group.serving)
    yield from (up, age, healthy, info, ranks, serving)
