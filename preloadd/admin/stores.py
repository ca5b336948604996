"""Whether a group's shared stores can be used, tried as the daemons' user would."""

from __future__ import annotations

from collections.abc import Iterator

from preloadd.admin.service import Service
from preloadd.config.files import Fault
from preloadd.config.group import Group

KEY = "warmup.stores"


def faults(group: Group, file: str, trial: Service, daemons: str, engines: str) -> Iterator[Fault]:
    """One for each store that could not: by the Python of `daemons`, and that of `engines`."""
    own = "" if engines == daemons else engines
    for name in group.warmup.stores:
        command = [daemons, "-P", "-m", "preloadd.warmup.stores", own, name]
        if why := trial.fails(command):
            what, colon, remedy = why.rpartition(": ")
            yield Fault(file, KEY, f"{what} ({remedy})" if colon else why)
