"""Where another node serves HTTP: a host and a port, as operators write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Self

from preloadd.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_WRITTEN = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^\[\]:/@?#]*)):(?P<port>[0-9]{1,5})")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`host` is a name or an address, an IPv6 address without its brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `host:port` or `http://host:port`; ConfigError says the remedy."""
        scheme = _SCHEME.match(text)
        if scheme is not None and scheme[1].lower() != "http":
            raise ConfigError(f"{text!r}: {scheme[1]} is not spoken (write http:// or nothing)")
        bare = text[scheme.end() :] if scheme is not None else text
        found = _WRITTEN.fullmatch(bare.removesuffix("/"))
        if found is None:
            raise ConfigError(f"{text!r}: {_remedy(bare)}")
        host = found["name"] if found["v6"] is None else found["v6"]
        port = int(found["port"])
        if not (_is_v6(host) if found["name"] is None else _NAME.fullmatch(host)):
            raise ConfigError(f"{text!r}: {host!r} is neither an address nor a name of a host")
        if not 1 <= port <= 65535:
            raise ConfigError(f"{text!r}: the port must be from 1 to 65535")
        return cls(host, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _remedy(bare: str) -> str:
    if _is_v6(bare) or _is_v6(bare.rpartition(":")[0]):
        return "write an IPv6 address in brackets and a port behind it, as [2001:db8::7]:9470"
    if "/" in bare.removesuffix("/") or "@" in bare or "?" in bare:
        return "write host and port alone, as node-2:9470"
    return "write a host and its port, as node-2:9470"


def _is_v6(text: str) -> bool:
    """Whether this is an IPv6 address, with or without a zone such as %eth0."""
    try:
        return text.isprintable() and isinstance(ip_address(text), IPv6Address)
    except ValueError:
        return False
