"""What files say, without reading them whenever it is asked for, or waiting for a hung disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import anyio

from preloadd.domain.files import FileIdentity
from preloadd.errors import PreloadError, ReadFailed
from preloadd.transport.threads import Threads

T = TypeVar("T")

AGAIN_S = 5.0
"""Seconds after which files that failed are tried again, though they look the same: it may not have
been their fault."""

LOOK_S = 1.0
"""Seconds for a look at files: all who come meanwhile wait for it."""


async def ask(disk: Threads, work: Callable[[], T], *, within: float) -> T:
    """What `work` on a disk returns, or raises; ReadFailed for an OSError, and if it does neither
    `within` so many seconds."""
    try:
        return await disk.run(work, within=within)
    except OSError as error:
        raise ReadFailed(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Made(Generic[T]):
    seen: list[FileIdentity | None]
    value: T


@dataclass(frozen=True, slots=True)
class _Failed:
    """Until `until` the same is said of what was seen; None if not even that could be."""

    seen: list[FileIdentity | None] | None
    until: float
    error: PreloadError | OSError


class Fresh(Generic[T]):
    """What `make` makes of `files`, on `disk`, made anew when one of them is another, has come or
    gone. `make` blocks, and is called beside the event loop."""

    def __init__(
        self,
        disk: str,
        files: Iterable[Path],
        make: Callable[[], T],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = Threads(disk)
        self._files = tuple(files)
        self._make = make
        self._clock = clock
        self._turn = anyio.Lock()
        self._found: _Made[T] | _Failed | None = None

    async def get(self) -> T:
        """The value as of now; whatever `make` raises, the same for a while unless files change.

        ReadFailed if that takes longer than `LOOK_S`, and at once for a while then.
        """
        async with self._turn:
            found = self._hanging() or await self._looked()
            self._found = found
        if isinstance(found, _Made):
            return found.value
        raise found.error.with_traceback(None)

    def _hanging(self) -> _Failed | None:
        found = self._found
        if isinstance(found, _Failed) and found.seen is None and self._clock() < found.until:
            return found
        return None

    async def _looked(self) -> _Made[T] | _Failed:
        try:
            # Whoever asks may be hung up on: that is no sign that the disk does not answer.
            with anyio.CancelScope(shield=True):
                found = await ask(self._disk, partial(self._look, self._found), within=LOOK_S)
        except ReadFailed as error:
            found = _Failed(None, self._clock() + AGAIN_S, error)
        return found

    def _look(self, before: _Made[T] | _Failed | None) -> _Made[T] | _Failed:
        seen = [_identity(path) for path in self._files]
        now = self._clock()
        known = isinstance(before, _Made) or (before is not None and now < before.until)
        if before is not None and known and before.seen == seen:
            return before
        try:
            return _Made(seen, self._make())
        except (PreloadError, OSError) as error:
            # Whoever connects has this asked for: files are not read for each of them.
            return _Failed(seen, now + AGAIN_S, error)


def _identity(path: Path) -> FileIdentity | None:
    with suppress(OSError):
        found = path.stat()
        return FileIdentity(
            found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        )
    return None
