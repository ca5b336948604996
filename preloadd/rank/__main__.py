"""`preloadd rank INSTANCE`: composes a rank daemon out of what its manager passed to it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import assert_never

import anyio

from preloadd.config.versions import with_versions
from preloadd.domain.settings import Memory, RankSettings
from preloadd.errors import ConfigError, PreloadError
from preloadd.linux import logs, streams
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.linux.lending import LENT, lend
from preloadd.linux.locks import Lock
from preloadd.linux.notify import Notifier, watchdog_interval, without_manager
from preloadd.linux.passed import inherited
from preloadd.linux.paths import prepare_socket_dir, unusable
from preloadd.memory.api import Keeper
from preloadd.memory.cuda.keeper import DeviceKeeper
from preloadd.memory.hip.keeper import DmaBufKeeper
from preloadd.memory.host import HostKeeper
from preloadd.protocol.messages import SETTINGS, TOKENS
from preloadd.rank.counting import counter
from preloadd.rank.daemon import Daemon
from preloadd.rank.device import Gpu, alone_with
from preloadd.rank.generation import Generation
from preloadd.rank.loading import Lend, Loader
from preloadd.rank.orders import Orders, orders, remember, warn_of_upgrades
from preloadd.rank.seeding.api import Answering, Exchange, Fetch, Giver
from preloadd.rank.seeding.secrets import passed_tokens, without_tokens
from preloadd.rank.warmup.compiled_code import CompiledCode
from preloadd.rank.warmup.rehearsal import Rehearsal, hindrance
from preloadd.rank.warmup.tables import RECORD, Tables
from preloadd.rank.warmup.warmup import WarmUp
from preloadd.transport.probe import ask_probe
from preloadd.transport.threads import settle
from preloadd.warmup.stores.chain import Stores
from preloadd.warmup.stores.opening import open_stores

log = logging.getLogger("preloadd.rank")

IDENTIFIER = "preloadd-rank"

_SETTLE_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon; the exit status says why it ended (see `errors.EXIT_STATUS`)."""
    if arguments is None:
        arguments = sys.argv[1:]
    streams.prepare()
    os.umask(0o077)
    logs.configure("INFO", os.environ, identifier=IDENTIFIER, waits=False)
    parked = inherited(os.environ, os.getpid())
    launched = SETTINGS in parked
    try:
        passed = passed_tokens(parked.pop(TOKENS, []))
        given = orders(arguments, parked.pop(SETTINGS, []), os.environ)
        settings = given.settings
        logs.configure(
            settings.log_level.upper(),
            os.environ,
            identifier=IDENTIFIER,
            fields=settings.labels,
            waits=False,
        )
        _serve(given, parked, passed)
    except (PreloadError, OSError, BaseExceptionGroup) as error:
        told = _tell_manager(error)
        if not isinstance(error, PreloadError):
            raise
        if not (told and launched and _is_one_stream()):
            log.error("%s", error)  # noqa: TRY400 - the text is for people, the trace would hide it
        return error.exit_status
    return 0


def _tell_manager(reason: BaseException) -> bool:
    """Leave a last word with the manager, who tells it to people long after this process; whether
    it has all of it."""
    with suppress(ConfigError):  # its socket is not there
        notifier = Notifier(os.environ)
        with closing(notifier):
            return notifier.failed(reason)
    return False


def _is_one_stream() -> bool:
    """Whether errors go where the output of this process and of the launcher goes, who tells them
    there. The journal is to have them with their codes."""
    same = os.path.samestat(os.fstat(1), os.fstat(2))
    return same and not logs.is_journal(os.environ, 2)


def _serve(given: Orders, parked: dict[str, list[OwnedFd]], passed: Sequence[str]) -> None:
    settings, policy, folder = given.settings, given.policy, given.folder
    environ = without_tokens(without_manager(os.environ))
    with Lock.take(folder, settings.instance):
        # Not before: until then the folder may be another daemon's.
        group = -1 if policy.group is None else policy.group
        prepare_socket_dir(folder, derived=False, mode=policy.folder_mode, group=group)
        ends = _ends(settings, passed, kept=bool(parked))
        remember(given, os.environ)

        def loaded(generation: Generation) -> None:
            remember(given, os.environ, generation.manifest.recipe.files)
            warn_of_upgrades(settings)

        loader = _loader(settings, folder, environ)
        tables = _tables(settings, folder, loader.environ, ends)
        warm_up = _warm_up(settings, tables, _rehearsal(settings, folder, environ), ends)
        giver = _giver(settings, loader, ends)
        notifier = Notifier(os.environ)
        daemon = Daemon(
            settings,
            policy,
            notifier,
            replace(
                loader,
                on_loaded=loaded,
                renewed=_renewed,
                warming=tables,
                lend=_lend(settings, ends),
            ),
            clock=time.monotonic,
            watchdog_s=watchdog_interval(os.environ),
            count=counter(os.environ, os.getpid(), Path("/proc/self/cgroup").read_text()),
            warm_up=warm_up,
            gpu=_gpu(settings, loader),
            seeder=_seeder(ends, warm_up, giver),
            giver=giver,
        )
        try:
            anyio.run(daemon.run, parked)
        except (PreloadError, OSError, BaseExceptionGroup) as error:
            raise _cause(error) from None
        finally:
            settle(_SETTLE_S)
            tables.close()
            notifier.close()


def _rehearsal(
    settings: RankSettings, folder: Path, environ: Mapping[str, str]
) -> Rehearsal | None:
    """The engine that this rank warms up with, if it is the one to do so."""
    if hindrance(settings):
        return None
    # The loader's, whose link to this package it shares.
    return Rehearsal.of(settings, lend(folder / LENT, environ) if settings.python else environ)


def _warm_up(
    settings: RankSettings, tables: Tables, rehearsal: Rehearsal | None, ends: Exchange | None
) -> WarmUp:
    """What sees to tables and, only with an engine that makes some, to compiled code."""
    if rehearsal is None:
        return WarmUp(settings, tables)
    code = CompiledCode(
        trusted=settings.warmup.trust_bundles,
        stores=lambda: tables.stores,
        fetch=_fetch(settings, ends),
        wall=lambda: datetime.now(UTC).timestamp(),
    )
    return WarmUp(settings, tables, rehearsal, code)


def _tables(
    settings: RankSettings, folder: Path, environ: Mapping[str, str], ends: Exchange | None
) -> Tables:
    """What sees to tables; it opens stores when there is time for that."""
    warm, seeding = settings.warmup, settings.seeding

    def stores() -> Stores:
        return open_stores(warm.stores, environ, python=settings.python)

    return Tables(
        folder / RECORD,
        enabled=warm.autotune,
        stores=stores if warm.stores else None,
        fetch=_fetch(settings, ends),
        within=seeding.within if seeding is not None else 0.0,
    )


def _fetch(settings: RankSettings, ends: Exchange | None) -> Fetch | None:
    """What asks this rank's source; None without one."""
    seeding = settings.seeding
    return ends.fetch if ends is not None and seeding and seeding.source else None


def _ends(settings: RankSettings, passed: Sequence[str], *, kept: bool) -> Exchange | None:
    """What seeding needs; None without it. PreloadError if it could not work, unless weights are
    `kept`, which are worth more."""
    if settings.seeding is None:
        return None
    # Not above: TLS would cost a start a tenth, which most ranks have no use for.
    from preloadd.rank.seeding.ends import Ends

    ends = Ends(settings.seeding, dict(os.environ), passed)
    try:
        ends.require()
    except PreloadError as error:
        if not kept:
            raise
        log.error("going on without seeding: %s", error)  # noqa: TRY400
        return None
    return ends


def _seeder(ends: Exchange | None, warm_up: WarmUp, giver: Giver | None) -> Answering | None:
    """What answers others, with all that this rank has for them; None where nobody asks."""
    if ends is None:
        return None
    givers = [] if giver is None else [giver]
    return ends.listener([*warm_up.kinds(), *(each.kind for each in givers)], givers)


def _lend(settings: RankSettings, ends: Exchange | None) -> Lend | None:
    """What has a loader get weights from the source, where that is asked for."""
    seeding = settings.seeding
    if ends is None or seeding is None or seeding.source is None or not seeding.weights:
        return None
    return ends.lend


def _giver(settings: RankSettings, loader: Loader, ends: Exchange | None) -> Giver | None:
    """What gives weights to others; None where that is not asked for, or nobody is answered."""
    seeding = settings.seeding
    if ends is None or seeding is None or seeding.listen is None or not seeding.weights:
        return None
    from preloadd.rank.seeding.giving import Giving

    return Giving(settings, loader.argv, loader.environ, clock=time.monotonic)


def _renewed(settings: RankSettings) -> RankSettings:
    return with_versions(settings, sys.executable, os.environ)


def _loader(settings: RankSettings, folder: Path, environ: Mapping[str, str]) -> Loader:
    """The loader's command; another interpreter than this one finds just this package by itself.

    It sees no GPU but the rank's own.
    """
    argv = [settings.python or sys.executable, "-m", "preloadd.loader"]
    memory = settings.model.memory
    environ = alone_with(settings.parsed_instance.device, memory, environ)
    if settings.python:
        imports = folder / LENT
        try:
            environ = lend(imports, environ)
        except OSError as error:
            raise unusable(imports, error) from error
    return Loader(argv, environ, _keeper(memory))


def _keeper(memory: Memory) -> Keeper:
    match memory:
        case Memory.HOST:
            return HostKeeper()
        case Memory.CUDA:
            return DeviceKeeper()
        case Memory.HIP:
            return DmaBufKeeper()
        case unreachable:
            assert_never(unreachable)


def _gpu(settings: RankSettings, loader: Loader) -> Gpu | None:
    memory = settings.model.memory
    if memory is Memory.HOST:
        return None
    ask = partial(ask_probe, loader.argv, loader.environ)
    return Gpu(settings.parsed_instance.device, memory, ask)


def _cause(error: BaseException) -> BaseException:
    """The error that a task group wrapped, unless there were several; with its meaning if known."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, OSError) and is_exhausted(error):
        return exhausted(error, "serving")
    return error


if __name__ == "__main__":
    sys.exit(main())
