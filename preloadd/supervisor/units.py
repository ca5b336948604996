"""What systemd says of the ranks' services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from preloadd.domain.lines import one_line
from preloadd.errors import NoServiceManager
from preloadd.linux.systemctl import Systemctl
from preloadd.supervisor.verdict import Unit


class ServiceManager:
    """Asks systemd. What it does not tell is missed by people alone: ranks are asked anyway."""

    def __init__(self, systemctl: Systemctl) -> None:
        self._systemctl = systemctl

    def __call__(self, names: Sequence[str]) -> Mapping[str, Unit]:
        """The services of these names that there are, none without systemd. Blocks.

        A status is what the service itself wrote, here on one line. ServiceManagerError,
        ServiceManagerDenied.
        """
        try:
            told = self._systemctl.show(names)
        except NoServiceManager:
            return {}
        return {
            unit.name: Unit(
                unit.name,
                unit.active,
                unit.sub,
                unit.result,
                one_line(unit.status),
                unit.restarts,
            )
            for unit in told
            if unit.loaded == "loaded"
        }
