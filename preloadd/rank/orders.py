"""What a rank is to serve: passed by the launcher that started it, or written in this host's files.

What the files said last is kept beside the socket. So a rank that comes back while somebody is half
way through an edit goes on with it, and its weights are not given up for a missing quote.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from preloadd import __version__
from preloadd.domain.ids import Instance
from preloadd.domain.settings import RUNNING, RankSettings, Running
from preloadd.errors import ConfigError, ModelNotFound
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.weights.checkpoint.locate import locate

log = logging.getLogger(__name__)

MAX_SETTINGS = 1 << 20


def orders(
    arguments: Sequence[str], passed: Sequence[OwnedFd], environ: Mapping[str, str]
) -> RankSettings:
    """The settings of the instance that the command line names. Closes every descriptor.

    ConfigError if nobody said what to serve, or not that of the command line; ModelNotFound.
    """
    try:
        if len(arguments) != 1:
            raise ConfigError("usage: preloadd rank INSTANCE")
        instance = Instance.parse(arguments[0])
        return _passed(passed[0], instance) if passed else _configured(instance, environ)
    finally:
        for fd in passed:
            fd.close()


def remember(settings: RankSettings, environ: Mapping[str, str]) -> None:
    """Keep the settings where the next life of this rank finds them, if the manager gave a place.

    To be called by whoever holds the lock of the instance.
    """
    if (path := _record(environ)) is None:
        return
    running = Running(version=__version__, pid=os.getpid(), settings=settings)
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(msgspec.json.encode(running))
        fresh.replace(path)
    except OSError as error:
        log.warning("%s could not be written: %s", path, error.strerror)


def _passed(fd: OwnedFd, instance: Instance) -> RankSettings:
    try:
        text = read_sealed(fd.fileno(), MAX_SETTINGS)
        settings = msgspec.json.decode(text, type=RankSettings)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the settings of {instance} cannot be read: {error}") from error
    if settings.parsed_instance != instance:
        raise ConfigError(f"the settings passed to {instance} are those of {settings.instance}")
    return settings


def _configured(instance: Instance, environ: Mapping[str, str]) -> RankSettings:
    # Not above: ranks of `preloadd run` do not pay for it, and it is the slowest of all imports.
    from preloadd.config.files import config_dir
    from preloadd.config.rank import Unclaimed, settings_on_this_host

    find = partial(locate, environ=environ)
    try:
        return settings_on_this_host(config_dir(environ), environ, instance, find)
    except Unclaimed:
        raise
    except (ConfigError, ModelNotFound) as error:
        last = _remembered(instance, environ)
        if last is None:
            raise
        log.error("going on with the settings of before, for these cannot be used: %s", error)  # noqa: TRY400
        return last


def _remembered(instance: Instance, environ: Mapping[str, str]) -> RankSettings | None:
    """What an earlier life of this rank was told, if it is known."""
    path = _record(environ)
    with suppress(OSError, msgspec.MsgspecError):
        if path is not None:
            settings = msgspec.json.decode(path.read_bytes(), type=Running).settings
            return settings if settings.parsed_instance == instance else None
    return None


def _record(environ: Mapping[str, str]) -> Path | None:
    """Where settings are kept: in the folder that systemd makes for this instance alone, keeps over
    a restart and removes at a stop."""
    folder = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(folder, RUNNING) if folder else None
