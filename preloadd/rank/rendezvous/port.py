"""The port of rank 0: where it listens, and why it cannot."""

from __future__ import annotations

import errno
import socket
from functools import partial

from preloadd.domain.ids import Role
from preloadd.domain.meeting import is_one_host
from preloadd.domain.settings import Rendezvous
from preloadd.transport import tcp


def port_at(place: Rendezvous) -> tcp.Port:
    """The port where other ranks connect."""
    return tcp.Port(partial(_listen, place), partial(no_port, place))


def no_port(place: Rendezvous, error: OSError) -> str:
    """Why rank 0 cannot listen, and what to do."""
    who = "ranks of this group's draft" if place.role is Role.DRAFT else "ranks of this group"
    told = f"the {who} cannot meet at {place.where}: "
    if isinstance(error, socket.gaierror):
        return (
            f"{told}this host does not know {place.address} ({error.strerror}): give all nodes a "
            "name of node 0 that each of them knows, or its address"
        )
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{told}port {place.port} is taken: see `ss -ltnp 'sport = :{place.port}'` for by "
                f"whom, and stop that, or give all nodes another {place.setting}"
            )
        case errno.EADDRNOTAVAIL:
            return (
                f"{told}{place.address} is no address of this host, which has rank 0: give all "
                "nodes an address of node 0 or, if this is not the first node, give it a node_rank "
                "(data_parallel_start_rank) of its own"
            )
        case errno.EACCES:
            return (
                f"{told}this user may not listen at port {place.port}: give all nodes another "
                f"{place.setting}, from 1024 up"
            )
        case _:
            return f"{told}{error.strerror or error}"


async def _listen(place: Rendezvous) -> list[socket.socket]:
    """Where others can connect; OSError if they cannot."""
    listeners = await tcp.listen(place.address, place.port)
    hosts = [listener.getsockname()[0] for listener in listeners]
    if all(map(is_one_host, hosts)) and not is_one_host(place.address):
        for listener in listeners:
            listener.close()
        raise OSError(
            f"on this host it means {', '.join(hosts)}, which no other host can reach: see "
            "/etc/hosts, or give all nodes the number of node 0's address"
        )
    return listeners
