"""Which entries of the journal belong to what a person names. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from preloadd.cli.exits import CommandFailed, Exit
from preloadd.cli.overview import Managed
from preloadd.cli.units import group_units, rank_unit
from preloadd.domain.ids import Instance
from preloadd.errors import ConfigError

ALL_UNITS = "preloadd*"


def command(
    name: str | None, groups: Mapping[str, Managed], *, follow: bool, lines: int
) -> list[str]:
    """The journalctl command for an instance, a group or everything; CommandFailed.

    What systemd itself says of a unit comes along: why it was ended, for one.
    """
    options = [f"--lines={lines}", *(["--follow"] if follow else [])]
    return ["journalctl", *options, *(f"--unit={unit}" for unit in _units(name, groups))]


def _units(name: str | None, groups: Mapping[str, Managed]) -> Sequence[str]:
    if name is None:
        return [ALL_UNITS]
    if name in groups:
        return [*group_units(name), *map(rank_unit, groups[name].instances)]
    try:
        return [rank_unit(str(Instance.parse(name)))]
    except ConfigError:
        known = ", ".join(groups)
        raise CommandFailed(
            f"{name} is neither an instance (as CPU-0) nor a group that systemd knows"
            f"{f': there are {known}' if known else ''}",
            Exit.NOT_FOUND,
        ) from None
