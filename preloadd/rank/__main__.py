"""`preloadd rank INSTANCE`: composes a rank daemon out of what its manager passed to it."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import anyio
import msgspec

from preloadd.domain.ids import Instance
from preloadd.domain.settings import RankSettings
from preloadd.errors import ConfigError, PreloadError
from preloadd.linux import logs, peers, seqpacket
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.linux.locks import Lock
from preloadd.linux.memfd import read_sealed
from preloadd.linux.notify import Notifier, inherited
from preloadd.linux.paths import prepare_socket_dir
from preloadd.memory.host import HostKeeper
from preloadd.rank.daemon import Daemon, watchdog_interval
from preloadd.rank.loading import Loader

log = logging.getLogger("preloadd.rank")

SETTINGS = "settings"
MAX_SETTINGS = 1 << 20
_MANAGER_ONLY = ("NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_USEC")


def main() -> int:
    """Run the daemon; the exit status says why it ended (see `errors.EXIT_STATUS`)."""
    logs.configure("INFO", os.environ)
    parked = inherited(os.environ, os.getpid())
    try:
        settings = _settings(sys.argv[1:], parked.pop(SETTINGS, []))
        logs.configure(settings.log_level.upper(), os.environ)
        _serve(settings, parked)
    except PreloadError as error:
        log.error("%s", error)  # noqa: TRY400 - the text is for people, the trace would hide it
        return error.exit_status
    except OSError as error:
        if not is_exhausted(error):
            raise
        log.error("%s", exhausted(error, "serving"))  # noqa: TRY400 - the text is for people
        return OutOfDescriptors.EXIT
    return 0


def _serve(settings: RankSettings, parked: dict[str, list[OwnedFd]]) -> None:
    os.umask(0o077)
    policy = peers.policy(settings.access, os.geteuid())
    folder = _folder(settings)
    environ = {name: value for name, value in os.environ.items() if name not in _MANAGER_ONLY}
    with Lock.take(folder, settings.instance):
        # Not before: until then the folder may be another daemon's.
        group = -1 if policy.group is None else policy.group
        prepare_socket_dir(folder, derived=False, mode=policy.folder_mode, group=group)
        notifier = Notifier(os.environ)
        daemon = Daemon(
            settings,
            policy,
            notifier,
            Loader([sys.executable, "-m", "preloadd.loader"], environ, HostKeeper()),
            clock=time.monotonic,
            watchdog_s=watchdog_interval(os.environ),
        )
        try:
            anyio.run(daemon.run, parked)
        except (PreloadError, BaseExceptionGroup) as error:
            cause = _unwrapped(error)
            notifier.status(f"failed: {cause}")
            raise cause from None
        finally:
            notifier.close()


def _folder(settings: RankSettings) -> Path:
    """The folder of this instance, made if need be; ConfigError, InsecurePath."""
    folder = Path(settings.socket_dir, settings.instance)
    seqpacket.check_length(folder / settings.parsed_instance.socket_name)
    try:
        prepare_socket_dir(folder.parent, derived=settings.derived)
        prepare_socket_dir(folder, derived=False)
    except OSError as error:
        raise ConfigError(
            f"the socket directory {folder.parent} cannot be used: {error.strerror}: give one "
            f"whose parent is there and that user {os.geteuid()} may write to"
        ) from error
    return folder


def _settings(arguments: list[str], passed: list[OwnedFd]) -> RankSettings:
    """What the manager wants served; ConfigError if it was not said or contradicts the command."""
    if len(arguments) != 1:
        raise ConfigError("usage: preloadd rank INSTANCE")
    instance = Instance.parse(arguments[0])
    if not passed:
        raise ConfigError(
            f"nobody said what {instance} is to serve: ranks are started by `preloadd run`"
        )
    try:
        text = read_sealed(passed[0].fileno(), MAX_SETTINGS)
        settings = msgspec.json.decode(text, type=RankSettings)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the settings of {instance} cannot be read: {error}") from error
    finally:
        for fd in passed:
            fd.close()
    if settings.parsed_instance != instance:
        raise ConfigError(f"the settings passed to {instance} are those of {settings.instance}")
    return settings


def _unwrapped(error: BaseException) -> BaseException:
    """The error that a task group wrapped, unless there were several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
