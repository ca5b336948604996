"""What the supervisor is made of: out of the command line alone, or out of this host's files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from preloadd.config.files import config_dir
from preloadd.config.host import Survey, require_host, survey
from preloadd.domain.endpoint import Endpoint
from preloadd.domain.ids import Instance
from preloadd.errors import ConfigError
from preloadd.linux.systemctl import Systemctl
from preloadd.supervisor.lookout import Pace, Units
from preloadd.supervisor.roster import Expected, Roster, Wanted
from preloadd.supervisor.units import ServiceManager

_OURS = ("NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_")


@dataclass(frozen=True, slots=True)
class Setup:
    """Where to look and where to serve."""

    socket_dir: Path
    roster: Roster
    host: str
    port: int
    log_level: str
    pace: Pace
    units: Units | None = None
    peers: tuple[Endpoint, ...] = ()


def setup(options: argparse.Namespace, environ: Mapping[str, str]) -> Setup:
    """What the options say, and where they say nothing this host's files; ConfigError."""
    instances = [Expected(Instance.parse(text)) for text in options.instance]
    if options.socket_dir is None:
        if instances:
            raise ConfigError("--instance needs --socket-dir: without, the configuration says both")
        return _configured(options, environ)
    return Setup(
        options.socket_dir,
        Roster(options.socket_dir, lambda: Wanted(tuple(instances)), scan=not instances),
        options.host or "127.0.0.1",
        options.port or 0,
        options.log_level or "info",
        Pace(),
        peers=_endpoints(options.peer),
    )


def _configured(options: argparse.Namespace, environ: Mapping[str, str]) -> Setup:
    folder = config_dir(environ)

    def wanted() -> Wanted:
        return ranks_of(survey(folder, environ))

    settings = require_host(survey(folder, environ))
    socket_dir = Path(settings.socket_dir)
    return Setup(
        socket_dir,
        Roster(socket_dir, wanted, scan=True),
        options.host or settings.supervisor.host,
        settings.supervisor.port if options.port is None else options.port,
        options.log_level or settings.log_level,
        Pace(overdue=settings.supervisor.ask_timeout_s),
        ServiceManager(Systemctl(_of_children(environ), timeout=settings.supervisor.ask_timeout_s)),
        _endpoints(options.peer or settings.supervisor.peers),
    )


def ranks_of(found: Survey) -> Wanted:
    """The ranks of every group whose file is right; the faults of all others are the trouble.

    ConfigError if the host's own files are wrong.
    """
    require_host(found)
    return Wanted(
        tuple(
            Expected(instance, file.group.name)
            for file in found.groups
            if file.group is not None
            for instance in file.group.instances
        ),
        "\n".join(map(str, found.faults)),
    )


def _endpoints(texts: Iterable[str]) -> tuple[Endpoint, ...]:
    """Each once; ConfigError, which is the command line's: files were judged before."""
    try:
        return tuple(dict.fromkeys(map(Endpoint.parse, texts)))
    except ConfigError as error:
        raise ConfigError(f"--peer {error}") from None


def _of_children(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what is said to this process alone: systemctl notifies whoever it finds there."""
    return {name: value for name, value in environ.items() if not name.startswith(_OURS)}
