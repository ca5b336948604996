"""Where ranks seed each other: the target's in a block of ports, the draft's in the next one."""

from __future__ import annotations

EVERYWHERE = ("0.0.0.0", "::", "[::]")  # noqa: S104 - named, not listened on
"""What stands for all addresses of a host that listens, and for none of one that is asked."""


def seed_port(base: int, *, world: int, rank: int, draft: bool) -> int:
    """The port of a global rank, where a group of `world` ranks begins at `base`."""
    return base + world * draft + rank


def seed_ports(*, world: int, drafts: bool) -> int:
    """How many ports in a row a group has, over all its nodes."""
    return world * (1 + drafts)
