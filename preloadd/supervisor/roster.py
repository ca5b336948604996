"""Which ranks there should be, and which there are."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from preloadd.domain.ids import Instance
from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, PreloadError
from preloadd.linux.fds import exhausted, is_exhausted
from preloadd.supervisor.nodes import MAX_RANKS

log = logging.getLogger(__name__)


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
        # It may name a file, and what that is called is not for everybody to write.
        trouble = "\n".join(map(one_line, self._last.trouble.splitlines()))
        self._last = replace(self._last, trouble=trouble)
        if self._last.trouble and self._last.trouble != before.trouble:
            log.error("%s", self._last.trouble)
        ranks = {rank.instance: rank for rank in self._last.ranks}
        for rank in found(self._socket_dir) if self._scan else ():
            ranks.setdefault(rank.instance, rank)
        return Wanted(tuple(ranks.values())[:MAX_RANKS], self._last.trouble)


def found(socket_dir: Path) -> tuple[Expected, ...]:
    """The ranks that have a socket below `socket_dir`, in the order of their names.

    A folder that cannot be read has none: ranks that are expected are missed by name. PreloadError
    where this process may open no more files.
    """
    try:
        # Of what lies below nothing is opened: it may go at any moment.
        names = sorted((path.name for path in socket_dir.iterdir()), key=_in_order)
    except OSError as error:
        if is_exhausted(error):
            raise exhausted(error, f"looking for ranks in {socket_dir}") from error
        return ()
    instances = [instance for name in names if (instance := _instance(name)) is not None]
    return tuple(
        Expected(instance)
        for instance in instances
        if os.path.lexists(socket_path(socket_dir, instance))
    )


def socket_path(socket_dir: Path, instance: Instance) -> Path:
    """Where the rank listens."""
    return socket_dir / str(instance) / instance.socket_name


def _instance(name: str) -> Instance | None:
    """The instance whose folder has this name; None if no rank's has."""
    try:
        return Instance.parse(name)
    except ConfigError:
        return None


def _in_order(name: str) -> tuple[int, str]:
    """Shorter names first, so that CPU-10 comes after CPU-9."""
    return len(name), name
