"""Where each rank of a group is: the target's in a block of ports, its draft's in the next one."""

from __future__ import annotations

from preloadd.errors import ConfigError


def port(base: int, *, world: int, rank: int, draft: bool) -> int:
    """The port of a global rank, where a group of `world` ranks begins at `base`."""
    return base + world * draft + rank


def check_ports(base: int, *, world: int, draft: bool, key: str) -> None:
    """ConfigError, which names the setting `key`, if a rank would have a port that is none."""
    last = port(base, world=world, rank=world - 1, draft=draft)
    if base < 1 or last > 65535:
        ranks = f"{world} ranks and as many of the draft" if draft else f"{world} ranks"
        raise ConfigError(
            f"{key}: {ranks} have the ports {base} to {last}, and ports go from 1 to 65535: choose "
            f"a first port up to {65535 - last + base}"
        )
