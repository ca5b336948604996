"""Which ranks there should be, and which there are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from preloadd.domain.ids import Instance
from preloadd.errors import ConfigError, PreloadError

log = logging.getLogger(__name__)

MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Expected:
    """A rank that is to be watched. `group` is '' until the rank itself tells it."""

    instance: Instance
    group: str = ""

    @property
    def unit(self) -> str:
        """The service that runs it under systemd."""
        return f"preloadd@{self.instance}.service"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The ranks to watch, each instance once, and what is wrong with the list itself, or ''."""

    ranks: tuple[Expected, ...]
    trouble: str = ""


Configured = Callable[[], Wanted]
"""The ranks that the configuration wants, read anew; PreloadError if it cannot be read at all."""


class Roster:
    """Asked again and again, tells which ranks to watch. Blocks for some files.

    Ranks of the configuration come first, absent or not; then, with `scan`, those that are found.
    While the configuration cannot be read, its last state holds, and `trouble` says so.
    """

    def __init__(self, socket_dir: Path, configured: Configured, *, scan: bool) -> None:
        self._socket_dir = socket_dir
        self._configured = configured
        self._scan = scan
        self._last = Wanted(())

    def __call__(self) -> Wanted:
        """The ranks as of now."""
        before = self._last
        try:
            self._last = self._configured()
        except PreloadError as error:
            self._last = Wanted(before.ranks, f"the last configuration still holds: {error}")
        if self._last.trouble and self._last.trouble != before.trouble:
            log.error("%s", self._last.trouble)
        ranks = {rank.instance: rank for rank in self._last.ranks}
        for rank in found(self._socket_dir) if self._scan else ():
            ranks.setdefault(rank.instance, rank)
        return Wanted(tuple(ranks.values())[:MAX_RANKS], self._last.trouble)


def found(socket_dir: Path) -> tuple[Expected, ...]:
    """The ranks that have a socket below `socket_dir`, in the order of their names.

    A folder that cannot be read has none: ranks that are expected are missed by name.
    """
    return tuple(
        Expected(instance)
        for path in sorted(socket_dir.glob("*/rank*.sock"), key=_in_order)
        if (instance := _instance(path)) is not None
    )


def socket_path(socket_dir: Path, instance: Instance) -> Path:
    """Where the rank listens."""
    return socket_dir / str(instance) / instance.socket_name


def _instance(path: Path) -> Instance | None:
    """The instance whose socket this is; None if it lies where no rank puts one."""
    try:
        instance = Instance.parse(path.parent.name)
    except ConfigError:
        return None
    return instance if path.name == instance.socket_name else None


def _in_order(path: Path) -> tuple[int, str]:
    """Shorter names first, so that CPU-10 comes after CPU-9."""
    return len(path.parent.name), path.parent.name
