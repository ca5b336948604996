"""`preloadctl doctor`: looks at everything that has to be right, and tells what is not.

Standard library only, so that it also runs where the reason is that something is not installed:
`/usr/bin/python3 -m preloadd.admin.doctor`.
"""

from __future__ import annotations

from preloadd.admin.doctor import (
    configuration,
    gpus,
    interpreter,
    manager,
    permissions,
    plugin,
    sockets,
    stores,
)
from preloadd.admin.findings import Finding
from preloadd.admin.world import World


def diagnose(world: World) -> list[Finding]:
    """Everything that was looked at, in the order in which to put things right."""
    raw = configuration.read(world)
    found = [*interpreter.examine(world)]
    found += configuration.examine(world, interpreter_works=not _broken(found))
    found += plugin.examine(world, raw)
    found += permissions.examine(world, raw)
    found += sockets.examine(world, raw)
    found += stores.examine(world, raw)
    found += manager.examine(world, raw)
    found += gpus.examine(world)
    return found


def _broken(found: list[Finding]) -> bool:
    return any(finding.severity == "fault" for finding in found)
