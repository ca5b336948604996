"""Hosts, and a node of one group on each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.nodes.hosts import Network
from tests.nodes.node import PORT, Node

GONE_S = 2.0
"""How long the kernel may take to do away with what has ended."""


class Cluster:
    """Hosts, and a node of one group on each: not started, until it is asked for.

    `limits` are deadlines of its ranks.
    """

    def __init__(
        self, network: Network, owned: ExitStack, model: Path, limits: dict[str, float]
    ) -> None:
        self.network = network
        self.hosts = network.hosts
        self._owned = owned
        self._model = model
        self._limits = limits

    def start(self, number: int, *flags: str, **more) -> Node:
        """Start the node of this number, as `Node` is made."""
        count, meeting = len(self.hosts), self.hosts[0].address
        where = ["--nnodes", str(count), "--node-rank", str(number)]
        where += ["--master-addr", meeting, "--weight-cache-master-port", str(PORT)]
        return self.start_at(number, *where, *flags, **more)

    def start_at(
        self,
        number: int,
        *flags: str,
        model: Path | None = None,
        limits: Mapping[str, float] = {},
        **more,
    ) -> Node:
        """The same with flags of its own for where it stands."""
        limits = {**self._limits, **limits}
        node = Node(self.hosts[number], model or self._model, *flags, limits=limits, **more)
        return self._owned.enter_context(node)

    def start_all(self, *flags: str, **more) -> list[Node]:
        """Start every node, and wait until all serve."""
        nodes = [self.start(number, *flags, **more) for number in range(len(self.hosts))]
        for node in nodes:
            node.serving()
        return nodes

    def clean(self) -> None:
        """Wait until nothing is left on any host that has power; fails if something is."""
        until = time.monotonic() + GONE_S
        while left := "; ".join(filter(None, (host.left for host in self.hosts))):
            assert time.monotonic() < until, f"left behind: {left}"
            time.sleep(0.02)
