"""What a rank is to serve: passed by the launcher that started it, or written in this host's files.

What the files said last is kept beside the socket. So a rank that comes back while somebody is half
way through an edit goes on with it, and its weights are not given up for a missing quote, a user
who cannot be looked up at the moment, or a file that it cannot read. And while the files are those
of before, they are not judged again, for which a start would take half as long again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from preloadd import __version__
from preloadd.config.files import config_dir
from preloadd.config.versions import with_versions
from preloadd.domain.access import Policy
from preloadd.domain.files import FileIdentity
from preloadd.domain.ids import Instance
from preloadd.domain.settings import RUNNING, Builder, RankSettings, Running
from preloadd.errors import ConfigError, InsecurePath, ModelNotFound, PreloadError
from preloadd.linux import peers, seqpacket
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.linux.memfd import read_sealed
from preloadd.linux.paths import prepare_socket_dir
from preloadd.rank import record
from preloadd.rank.sources import fingerprint
from preloadd.weights.checkpoint import identities_of, locate

log = logging.getLogger(__name__)

MAX_SETTINGS = 1 << 20
_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


@dataclass(frozen=True, slots=True)
class Orders:
    """What to serve, and what that means on this host: who may attach, and the rank's `folder`.

    `made_from` is the fingerprint of the files that said so; '' if there are none.
    """

    settings: RankSettings
    policy: Policy
    folder: Path
    made_from: str = ""


def orders(
    arguments: Sequence[str], passed: Sequence[OwnedFd], environ: Mapping[str, str]
) -> Orders:
    """What the instance that the command line names is to do. Closes every descriptor.

    The folder is there afterwards. ConfigError if nobody said what to serve, not that of the
    command line, or what cannot be done on this host; ModelNotFound, InsecurePath.
    """
    try:
        if len(arguments) != 1:
            raise ConfigError("usage: preloadd rank INSTANCE")
        instance = Instance.parse(arguments[0])
        if passed:
            return _meant(_passed(passed[0], instance), environ)
        return _configured(instance, environ)
    finally:
        for fd in passed:
            fd.close()


def remember(
    given: Orders, environ: Mapping[str, str], files: Sequence[FileIdentity] | None = None
) -> None:
    """Keep the orders where the next life of this rank finds them, if the manager gave a place.

    `files` are those of the checkpoint that was loaded; of one that was not yet, those that are
    there now: weights of other files are not adopted. To be called by whoever holds the lock of
    the instance.
    """
    if (path := _record(environ)) is None:
        return
    seen = _files(given.settings) if files is None else tuple(files)
    running = Running(__version__, os.getpid(), given.settings, given.policy, seen, given.made_from)
    record.leave(path, msgspec.json.encode(running))


def warn_of_upgrades(settings: RankSettings) -> None:
    """Say so if it cannot be seen which vLLM is installed; once it has loaded weights, since where
    there is none the loader has said that."""
    if settings.model.builder is Builder.VLLM and not settings.versions.vllm:
        log.warning(
            "no vLLM is found in the folders of %s, so that an upgrade of it would not be noticed: "
            "stop the group before one, or name the interpreter of a virtual environment",
            settings.python or sys.executable,
        )


def _passed(fd: OwnedFd, instance: Instance) -> RankSettings:
    try:
        text = read_sealed(fd.fileno(), MAX_SETTINGS)
        settings = msgspec.json.decode(text, type=RankSettings)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the settings of {instance} cannot be read: {error}") from error
    if settings.parsed_instance != instance:
        raise ConfigError(f"the settings passed to {instance} are those of {settings.instance}")
    return settings


def _configured(instance: Instance, environ: Mapping[str, str]) -> Orders:
    last = _remembered(instance, environ)
    try:
        settings, made_from = _written(instance, environ, last)
        return replace(_meant(settings, environ), made_from=made_from)
    except (ConfigError, InsecurePath, ModelNotFound) as error:
        if last is None or _is_an_answer(error):
            raise
        log.error("going on with the settings of before, for these cannot be used: %s", error)  # noqa: TRY400
        return replace(_meant(last.settings, environ, last.policy), made_from=last.made_from)


def _written(
    instance: Instance, environ: Mapping[str, str], last: Running | None
) -> tuple[RankSettings, str]:
    """What the files say, and their fingerprint; judged only if they are not those of `last`."""
    folder, find = config_dir(environ), partial(locate, environ=environ)
    found = fingerprint(folder, environ)
    if last is not None and found and found == last.made_from:
        return _located(last.settings, find), found
    with _without_plugins():
        # Not above, because it is the slowest of all imports.
        from preloadd.config.rank import settings_on_this_host
    settings = settings_on_this_host(
        folder, environ, instance, find if last else partial(_found_or_not, find)
    )
    if settings.rendezvous is None:
        settings = _located(settings, find)
    # Files that were written meanwhile may be others than those that were judged.
    return settings, found if found == fingerprint(folder, environ) else ""


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Keep pydantic from reading about every package that is installed, for plugins to load."""
    before = os.environ.get(_PLUGINS)
    os.environ[_PLUGINS] = "__all__"
    try:
        yield
    finally:
        # The loader's environment is made of this one.
        del os.environ[_PLUGINS]
        os.environ.update({} if before is None else {_PLUGINS: before})


def _located(settings: RankSettings, find: Callable[[str, str], Path]) -> RankSettings:
    """The same with models where they lie now: another snapshot may be the current one."""
    model, partner = settings.model, settings.model.partner
    if partner is not None:
        partner = replace(partner, path=str(find(partner.name, partner.revision)))
    path = str(find(model.name, model.revision))
    return replace(settings, model=replace(model, path=path, partner=partner))


def _found_or_not(find: Callable[[str, str], Path], name: str, revision: str) -> Path:
    """Where a model lies, or would: on one of several nodes a rank that has nothing to fall back on
    is started without one as well, for the others to hear of that."""
    try:
        return find(name, revision)
    except ModelNotFound:
        return Path(name)


def _is_an_answer(error: PreloadError) -> bool:
    """Whether the files are in order, and say that there is nothing to do."""
    from preloadd.config.rank import Unclaimed

    return isinstance(error, Unclaimed)


def _remembered(instance: Instance, environ: Mapping[str, str]) -> Running | None:
    """What an earlier life of this rank was told, if it is known."""
    path = _record(environ)
    with suppress(OSError, InsecurePath, msgspec.MsgspecError):
        if path is not None:
            running = msgspec.json.decode(record.left(path) or b"", type=Running)
            return running if running.settings.parsed_instance == instance else None
    return None


def _meant(
    settings: RankSettings, environ: Mapping[str, str], before: Policy | None = None
) -> Orders:
    """What `settings` mean here and now; who may attach is as `before` if that is known."""
    settings = with_versions(settings, sys.executable, environ)
    owner = os.geteuid()
    policy = replace(before, owner=owner) if before else peers.policy(settings.access, owner)
    mine = {os.getegid(), *os.getgroups()}
    policy = replace(policy, may_give=owner == 0 or policy.gids <= mine)
    if not policy.may_give:
        log.warning(
            "group %s cannot be given the socket by this process, which is no member: users who "
            "may not attach can connect as well, and are refused then",
            ", ".join(map(str, sorted(policy.gids - mine))),
        )
    return Orders(settings, policy, _folder(settings))


def _folder(settings: RankSettings) -> Path:
    """The folder of this instance, made if need be; ConfigError, InsecurePath."""
    folder = Path(settings.socket_dir, settings.instance)
    seqpacket.check_length(folder / settings.parsed_instance.socket_name)
    try:
        prepare_socket_dir(folder.parent, derived=settings.derived)
        prepare_socket_dir(folder, derived=False)
    except OSError as error:
        if is_exhausted(error):
            raise exhausted(error, f"opening {folder.parent}") from error
        raise ConfigError(
            f"the socket directory {folder.parent} cannot be used: {error.strerror}: give one "
            f"whose parent is there and that user {os.geteuid()} may write to"
        ) from error
    return folder


def _files(settings: RankSettings) -> tuple[FileIdentity, ...]:
    """The files of the checkpoint as they are now; none if they cannot be seen."""
    with suppress(PreloadError):
        return tuple(identities_of(Path(settings.model.path)))
    return ()


def _record(environ: Mapping[str, str]) -> Path | None:
    """Where settings are kept: in the folder that systemd makes for this instance alone, keeps over
    a restart and removes at a stop."""
    folder = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(folder, RUNNING) if folder else None
