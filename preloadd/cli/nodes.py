"""Other nodes, as this host's supervisor has heard of them. Without it, none is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

import msgspec

from preloadd.cli.overview import Overview
from preloadd.cli.views import Everywhere, Node, NodeRank, everywhere
from preloadd.domain.endpoint import Endpoint
from preloadd.errors import ConfigError, PreloadError, ProtocolViolation
from preloadd.protocol.messages import Seconds

PATH = "/v1/peers"

LIMIT = 1 << 25
"""Bytes of an answer: room for every rank of as many nodes as a supervisor takes."""

_HOST, _PORT = "127.0.0.1", "9470"


class _Group(msgspec.Struct, frozen=True):
    name: str
    ranks: tuple[NodeRank, ...]


class _Peer(msgspec.Struct, frozen=True):
    """A node as `/v1/peers` tells of it; what else that tells is passed over."""

    address: str
    reachable: bool
    problem: str
    age_seconds: Seconds | None
    host: str
    version: str
    groups: tuple[_Group, ...]

    def node(self, group: str) -> Node:
        """With the ranks of one group."""
        return Node(
            self.address,
            self.host,
            self.version,
            self.reachable,
            self.problem,
            self.age_seconds,
            tuple(rank for found in self.groups if found.name == group for rank in found.ranks),
        )


class _Peers(msgspec.Struct, frozen=True):
    peers: tuple[_Peer, ...]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the supervisor of this host is asked, and how long it has to answer (seconds)."""

    supervisor: Endpoint
    timeout: float

    def with_group(self, seen: Overview, name: str) -> Everywhere:
        """What is `seen` here of the group, and what is heard of it elsewhere. Blocks.

        CommandFailed if it is nowhere. Without a supervisor there is a note that says so.
        """
        try:
            nodes = self._ask(name)
        except PreloadError as error:
            note = (
                f"other nodes are not known: the supervisor of this host, at {self.supervisor}: "
                f"{error} (if it serves elsewhere: --supervisor HOST:PORT)"
            )
            return everywhere(seen, name, (), note=note)
        return everywhere(seen, name, nodes, supervisor=str(self.supervisor))

    def _ask(self, group: str) -> list[Node]:
        # Here, because the library's client takes 20 ms that no other command need wait for.
        from preloadd.transport import web

        # A name from the command line may be any bytes.
        path = f"{PATH}?{urlencode({'group': group}, errors='surrogateescape')}"
        body = web.get(self.supervisor, path, timeout=self.timeout, limit=LIMIT)
        try:
            told = msgspec.json.decode(body, type=_Peers)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolViolation("what it answers does not tell of nodes") from error
        return [peer.node(group) for peer in told.peers]


def supervisor_at(chosen: str | None, environ: Mapping[str, str]) -> Endpoint:
    """Where the supervisor serves: where somebody says, else where the environment does, else where
    it does by default. ConfigError."""
    if chosen is not None:
        try:
            return Endpoint.parse(chosen)
        except ConfigError as error:
            raise ConfigError(f"--supervisor {error}") from None
    host = environ.get("PRELOADD_SUPERVISOR_HOST") or _HOST
    port = environ.get("PRELOADD_SUPERVISOR_PORT") or _PORT
    try:
        return Endpoint.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except ConfigError as error:
        raise ConfigError(f"PRELOADD_SUPERVISOR_HOST, PRELOADD_SUPERVISOR_PORT: {error}") from None
