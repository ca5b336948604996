"""How many descriptors systemd keeps for this rank, asked of systemd itself.

Parking is a message without an answer: a unit without an fd store, or with a full one, loses what
it is told to keep, and says so in its own journal alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from preloadd.errors import ConfigError, ServiceManagerError

Count = Callable[[], int | None]
"""Asks; None where nobody can tell. Blocks."""

TIMEOUT_S = 2.0
_UNIT = re.compile(r"/([^/]+\.service)(?:/|$)")


def counter(environ: Mapping[str, str], pid: int, cgroups: str) -> Count:
    """The count for process `pid`, whose control groups (/proc/PID/cgroup) are `cgroups`.

    Only a process that systemd started itself has a store there; any other one is kept by whoever
    started it.
    """
    unit = unit_of(cgroups) if environ.get("SYSTEMD_EXEC_PID") == str(pid) else None
    if unit is None:
        return lambda: None

    def count() -> int | None:
        from preloadd.linux.systemctl import Systemctl  # not for ranks that adopt their weights

        try:
            (told,) = Systemctl(environ, timeout=TIMEOUT_S).show([unit])
        except (ServiceManagerError, ConfigError):
            # Mostly for want of D-Bus, without which only root may ask.
            return None
        return told.parked

    return count


def unit_of(cgroups: str) -> str | None:
    """The innermost service named in the content of a /proc/PID/cgroup."""
    found = [match for line in cgroups.splitlines() for match in _UNIT.findall(line)]
    return found[-1] if found else None
