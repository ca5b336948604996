"""Both ends of a rank's seeding, as its settings have them: whom it answers, and whom it asks."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from preloadd.domain.settings import Seeding, Tls
from preloadd.errors import ConfigError, PreloadError
from preloadd.rank.seeding import taking
from preloadd.rank.seeding.api import Stream
from preloadd.rank.seeding.client import fetch
from preloadd.rank.seeding.fresh import Fresh, ask
from preloadd.rank.seeding.listener import Listener
from preloadd.rank.seeding.secrets import admission, own_token, require_tokens
from preloadd.transport.aio import Link
from preloadd.transport.certificates import asking, listening, require_usable
from preloadd.transport.threads import Threads
from preloadd.warmup.seeding.kinds import Kind, Outcome, Seeded, Wanted

log = logging.getLogger(__name__)

T = TypeVar("T")

OWN_S = 5.0
"""Seconds for reading what this rank shows to its source."""


def wall_now() -> float:
    """Seconds since 1970, by which tokens expire."""
    return datetime.now(UTC).timestamp()


class Ends:
    """What a rank needs for seeding: its settings, and the tokens it was passed or can find."""

    def __init__(
        self,
        seeding: Seeding,
        environ: Mapping[str, str],
        passed: Sequence[str] = (),
        *,
        wall: Callable[[], float] = wall_now,
    ) -> None:
        self._seeding = seeding
        self._environ = environ
        self._passed = tuple(passed)
        self._wall = wall
        self._disk = Threads("the disk that the token and the files for TLS are on")

    def require(self) -> None:
        """ConfigError, InsecurePath or ReadFailed if it could not work: tokens, files for TLS."""
        seeding = self._seeding
        require_tokens(seeding, self._environ, self._passed, wall=self._wall())
        listens, asks = seeding.listen is not None, seeding.source is not None
        require_usable(seeding.tls, listens=listens, asks=asks, prefix="seed.tls_")

    def listener(self, kinds: Iterable[Kind], streams: Iterable[Stream] = ()) -> Listener | None:
        """What answers others with `kinds` and `streams`, to be served; None if nobody is to be
        answered."""
        place, files = self._seeding.listen, self._seeding.tls
        if place is None:
            return None
        admits = admission(self._seeding, self._environ, self._passed, wall=self._wall)
        context = _listening(files) if files else None
        return Listener(place.host, place.port, kinds, admits, streams=streams, tls=context)

    async def fetch(self, wanted: Wanted[T], *, within: float | None = None) -> Seeded[T]:
        """What the source has of what is `wanted`; never an error. `within` is that of the
        settings unless it is given."""
        source = self._seeding.source
        if source is None:
            return Seeded(Outcome.MISSING, "there is no source")
        seconds = self._seeding.within if within is None else within
        try:
            token, context = await ask(self._disk, self._shown, within=min(seconds, OWN_S))
        except PreloadError as error:
            return Seeded(Outcome.REFUSED, str(error))
        return await fetch(source, wanted, token, within=seconds, tls=context)

    async def lend(self, link: Link) -> None:
        """Answer a loader that asks for streams to the source, until it hangs up."""
        source = self._seeding.source
        try:
            token = await ask(self._disk, self._token, within=OWN_S)
        except PreloadError as error:
            log.warning("no weights are asked for: %s", error)
            return
        if source is not None:
            await taking.serve(link, source, token)

    def _shown(self) -> tuple[str, ssl.SSLContext | None]:
        files = self._seeding.tls
        return self._token(), _of_files(asking, files) if files else None

    def _token(self) -> str:
        return own_token(self._seeding, self._environ, self._passed)


def _listening(files: Tls) -> Callable[[], Awaitable[ssl.SSLContext]]:
    """The context of now: certificates are renewed while ranks live. While one cannot be used, the
    one of before; the first is of now, where the caller may still wait for a disk."""
    paths = [Path(path) for path in (files.cert, files.key, files.ca) if path]
    make = partial(_of_files, listening, files)
    fresh = Fresh("the disk that the files for TLS are on", paths, make)
    before: list[ssl.SSLContext] = []
    with suppress(ConfigError):  # said to whoever comes, if it stays so
        before.append(make())
    told: set[str] = set()

    async def context() -> ssl.SSLContext:
        try:
            before[:] = [await fresh.get()]
            told.clear()
        except PreloadError as error:
            if not before:
                raise
            if str(error) not in told:
                told.add(str(error))
                log.warning("the certificate of before is presented: %s", error)
        return before[0]

    return context


def _of_files(make: Callable[[Tls], ssl.SSLContext], files: Tls) -> ssl.SSLContext:
    try:
        return make(files)
    except ConfigError as error:
        raise ConfigError(f"seed.tls_{error}") from None
