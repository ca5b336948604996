"""What files say, without reading them whenever it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from preloadd.domain.files import FileIdentity
from preloadd.errors import PreloadError

T = TypeVar("T")

AGAIN_S = 5.0
"""Seconds after which files that failed are tried again, though they look the same: it may not have
been their fault."""


class Fresh(Generic[T]):
    """What `make` makes of `files`, made anew when one of them is another, has come or gone."""

    def __init__(
        self,
        files: Iterable[Path],
        make: Callable[[], T],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = tuple(files)
        self._make = make
        self._clock = clock
        self._made: tuple[list[FileIdentity | None], T] | None = None
        self._failed: tuple[list[FileIdentity | None], float, PreloadError | OSError] | None = None

    def get(self) -> T:
        """The value as of now; whatever `make` raises, the same for a while unless files change."""
        seen = [_identity(path) for path in self._files]
        if self._made is None or self._made[0] != seen:
            self._made = None
            self._made = seen, self._made_of(seen)
        return self._made[1]

    def _made_of(self, seen: list[FileIdentity | None]) -> T:
        now = self._clock()
        if self._failed is not None and self._failed[0] == seen and now < self._failed[1]:
            raise self._failed[2].with_traceback(None)
        self._failed = None
        try:
            return self._make()
        except (PreloadError, OSError) as error:
            # Whoever connects has this asked for: files are not read for each of them.
            self._failed = seen, now + AGAIN_S, error
            raise


def _identity(path: Path) -> FileIdentity | None:
    with suppress(OSError):
        found = path.stat()
        return FileIdentity(
            found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        )
    return None
