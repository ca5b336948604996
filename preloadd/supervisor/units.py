"""What systemd says of the ranks' services."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from preloadd.errors import NoServiceManager, PreloadError
from preloadd.linux.systemctl import Systemctl
from preloadd.supervisor.verdict import Unit

log = logging.getLogger(__name__)


class ServiceManager:
    """Asks systemd. What it does not tell is missed by people alone: ranks are asked anyway."""

    def __init__(self, systemctl: Systemctl) -> None:
        self._systemctl = systemctl
        self._complained = False

    def __call__(self, names: Sequence[str]) -> Mapping[str, Unit]:
        """The services of these names that there are. Blocks for a moment, and never raises."""
        try:
            told = self._systemctl.show(names)
        except NoServiceManager:
            return {}
        except PreloadError as error:
            if not self._complained:
                log.warning("nothing is known of services: %s", error)
            self._complained = True
            return {}
        self._complained = False
        return {
            unit.name: Unit(
                unit.name, unit.active, unit.sub, unit.result, unit.status, unit.restarts
            )
            for unit in told
            if unit.loaded == "loaded"
        }
