"""Where the ranks of a group meet before they load: an address of the first node, and ports.

Targets and drafts meet apart from each other. Nothing else may use these ports: a group's ranks
may load again while engines serve.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import combinations
from typing import NamedTuple

from preloadd.domain.launch import Launch, Misfit
from preloadd.domain.seeding import seed_ports

LOOPBACK = "127.0.0.1"
LAST_PORT = 65535

_EVERYBODY = IPv4Address("255.255.255.255")

_ENGINE_PORT = 29501
_ENGINE_RPC_PORT = 29550
"""What engines use unless they are told (source: `ParallelConfig` of vLLM)."""

_MASTER = "master_port"
_RPC = "data_parallel_rpc_port"
_TARGET = "weight_cache_master_port"
_DRAFT = "weight_cache_draft_master_port"
_REACHABLE = "the first node's address, as all nodes reach it"

_ONE_HOST = re.compile(
    r"(?:.*\.)?localhost(?:[46]?\.localdomain[46]?)?\.?|localhost[46]|ip6-(?:localhost|loopback)"
    r"|127(?:\.\d+){0,3}|0",
    re.IGNORECASE,
)
"""Names and short forms by which a host means itself."""

_NAME = re.compile(r"(?:(?!-)[a-z0-9_-]+\.)*(?!-|[0-9]+\.?$|0x)[a-z0-9_-]+\.?", re.IGNORECASE)
"""What can be looked up: no port, no path, and no number that is short of being an address."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A port of None is any free one of this host. Without drafts there is no `draft_port`."""

    address: str
    port: int | None
    draft_port: int | None


class _Ports(NamedTuple):
    """Ports in a row, and whose they are; where to say otherwise, and how the first came about."""

    first: int
    length: int
    told: str
    setting: str = ""
    because: str = ""

    @property
    def last(self) -> int:
        return self.first + self.length - 1

    @property
    def written(self) -> str:
        """The ports, with their arithmetic."""
        more = "" if self.length == 1 else f" to {self.first} + {self.length - 1} = {self.last}"
        return f"{self.because}{self.first}{more}"


def meeting_of(launch: Launch) -> Meeting:
    """Where the ranks of a launch without faults meet."""
    ports = {each.setting: each.first for each in _own_ports(launch)}
    return Meeting(_address(launch) or LOOPBACK, ports.get(_TARGET), ports.get(_DRAFT))


def meeting_faults(launch: Launch, ranks: range | None) -> list[Misfit]:
    """What is wrong with address and ports. `ranks` are this node's, None if they have a fault."""
    return [*_unsaid(launch, ranks), *port_faults(launch)]


def port_faults(launch: Launch) -> list[Misfit]:
    """What is wrong with ports, as far as that is no matter of which ranks are where."""
    own = _own_ports(launch)
    listened, asked = _seed_ports(launch)
    impossible = [*_impossible([*own, *listened, *asked])]
    settings = {misfit.setting for misfit in impossible}
    ports = [*_foreign_ports(launch), *own, *listened]
    return [*impossible, *_overlaps([each for each in ports if each.setting not in settings])]


def is_one_host(address: str) -> bool:
    """Whether an address means another host on every host, or cannot be connected to."""
    bare = address.strip("[]").partition("%")[0]
    try:
        found: IPv4Address | IPv6Address = ip_address(bare)
    except ValueError:
        return bool(_ONE_HOST.fullmatch(bare))
    if isinstance(found, IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    return found.is_loopback or found.is_unspecified


def is_address(address: str) -> bool:
    """Whether an address can be that of a host: a name, or numbers."""
    bare = address.strip("[]")
    try:
        found: IPv4Address | IPv6Address = ip_address(bare)
    except ValueError:
        try:
            return bool(_NAME.fullmatch(bare.encode("idna").decode()))
        except UnicodeError:
            return False
    return not found.is_multicast and found != _EVERYBODY


def _address(launch: Launch) -> str:
    """As engines choose it: replicas meet at `master_addr` unless another address is said."""
    return (launch.parallel.data > 1 and launch.data_parallel_address) or launch.master_addr


def _unsaid(launch: Launch, ranks: range | None) -> Iterator[Misfit]:
    """What has to be said where ranks span nodes: nobody can guess it there."""
    if not launch.spans:
        return
    where = "ranks are on several nodes"
    if ranks is not None:
        where = f"of {launch.parallel.world} ranks only {ranks.start} to {ranks[-1]} are here"
    address = _address(launch)
    if not address:
        yield Misfit(_address_setting(launch), f"must be given, since {where}: {_REACHABLE}")
    elif is_one_host(address):
        yield Misfit(
            _address_setting(launch),
            f"{address!r} is another host on each host, but {where}: give {_REACHABLE}",
        )
    elif not is_address(address):
        text = f"{address!r} is no host's name or address: give {_REACHABLE}, and nothing else"
        yield Misfit(_address_setting(launch), text)
    if launch.weight_cache_master_port is None:
        yield Misfit(_TARGET, f"must be given, since {where}: one port, the same on every node")


def _address_setting(launch: Launch) -> str:
    """Where to say another address."""
    if launch.parallel.data == 1 or (launch.master_addr and not launch.data_parallel_address):
        return "master_addr"
    return "data_parallel_address"


def _own_ports(launch: Launch) -> list[_Ports]:
    """The port of each role that is said, or follows: drafts have the one behind the targets'."""
    target, draft = launch.weight_cache_master_port, launch.weight_cache_draft_master_port
    found = [] if target is None else [_Ports(target, 1, "the target's", _TARGET)]
    if launch.drafts and draft is not None:
        found.append(_Ports(draft, 1, "the draft's", _DRAFT))
    elif launch.drafts and target is not None:
        because = f"weight-cache-master-port {target} + 1 = "
        found.append(_Ports(target + 1, 1, "the draft's", _DRAFT, because))
    return found


def _seed_ports(launch: Launch) -> tuple[list[_Ports], list[_Ports]]:
    """The ports at which all ranks of the group are asked, and those at which they ask.

    As if all were on this node: so each node comes to the same verdict.
    """
    count = seed_ports(world=launch.parallel.world, drafts=launch.drafts)

    def ports(setting: str, first: int | None) -> list[_Ports]:
        return [] if first is None else [_Ports(first, count, "that of seeding", setting)]

    return (
        ports("seed_listen_port", launch.seed_listen_port),
        ports("seed_source_port", launch.seed_source_port),
    )


def _foreign_ports(launch: Launch) -> Iterator[_Ports]:
    """Ports that something else has. An engine that spans nodes has its own, said or not."""
    yield from (_Ports(port, 1, told) for told, port in launch.others.items() if port)
    master, rpc = launch.master_port, launch.data_parallel_rpc_port
    if master is None and launch.by_nodes:
        master = _ENGINE_PORT
    if rpc is None and launch.spans and launch.parallel.data > 1:
        rpc = _ENGINE_RPC_PORT
    for setting, port in ((_MASTER, master), (_RPC, rpc)):
        if port is not None:
            yield _Ports(port, 1, f"the engine's {setting.replace('_', '-')}", setting)


def _impossible(own: Iterable[_Ports]) -> Iterator[Misfit]:
    for each in own:
        if each.first < 1:
            yield Misfit(each.setting, f"is {each.first}: give 1 to {LAST_PORT}")
        elif each.last > LAST_PORT:
            text = f"{each.written} is past the last port, {LAST_PORT}: give a lower one"
            yield Misfit(each.setting, text)


def _overlaps(ports: Sequence[_Ports]) -> Iterator[Misfit]:
    """A line for each range that shares a port with one before it.

    Both of the engine's may be the same: that is its own matter.
    """
    for earlier, later in combinations(ports, 2):
        if not later.setting or {earlier.setting, later.setting} == {_MASTER, _RPC}:
            continue
        if earlier.first <= later.last and later.first <= earlier.last:
            yield Misfit(
                later.setting,
                f"{later.written} is in use: {earlier.written} is {earlier.told}: give another one",
                (earlier.setting,) if earlier.setting else (),
            )
