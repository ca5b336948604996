"""Looks at everything there is: ranks by their sockets and units by systemd, at the same time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from preloadd.cli import ranks, units
from preloadd.cli.overview import Overview, Rank, overview, with_rates
from preloadd.cli.ranks import Folders, RankAddress
from preloadd.errors import NoServiceManager, PreloadError
from preloadd.linux.systemctl import Systemctl
from preloadd.linux.threads import starting

RATE_OVER = 0.25
"""Seconds between two looks that tell how fast a rank loads."""


@dataclass(frozen=True, slots=True)
class Lookout:
    """Where to look, and how long each rank has to answer (seconds)."""

    folders: Folders
    systemctl: Systemctl
    timeout: float

    def look(self) -> Overview:
        """How everything is now. Takes the timeout once, or twice, however many ranks hang."""
        found, services, trouble = self._look()
        if units.disagree(found, services):
            found, services, trouble = self._look()
        merged = units.merge(found, services)
        looked_in = list(map(str, self.folders.paths))
        return overview(merged, services.groups, [*self.folders.notes, *trouble], looked_in)

    def _look(self) -> tuple[list[Rank], units.Services, tuple[str, ...]]:
        told = _InBackground(self.systemctl)
        found = ranks.ask_all(ranks.addresses(self.folders.paths), timeout=self.timeout)
        return found, *told.result()

    def look_with_rates(self) -> Overview:
        """The same; ranks that load are asked once more, a little later, for the speed of that."""
        seen, began = self.look(), time.monotonic()
        loading = [rank for rank in seen.ranks if rank.loads]
        if not loading:
            return seen
        time.sleep(RATE_OVER)
        again = ranks.ask_all([RankAddress.of(rank) for rank in loading], timeout=self.timeout)
        return with_rates(seen, loading, again, time.monotonic() - began)


class _InBackground:
    """What systemd tells, asked for in a thread of its own."""

    def __init__(self, systemctl: Systemctl) -> None:
        self._systemctl = systemctl
        self._services = units.Services()
        self._trouble: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        with starting("asking systemd"):
            self._thread.start()

    def result(self) -> tuple[units.Services, tuple[str, ...]]:
        """The services, none where there is no systemd, and what went wrong. Blocks."""
        self._thread.join()
        return self._services, self._trouble

    def _ask(self) -> None:
        try:
            self._services = units.ask(self._systemctl)
        except NoServiceManager:
            pass  # a container, or a development machine: what is on the sockets is all there is
        except PreloadError as error:
            self._trouble = (f"what systemd knows is missing here: {error}",)
