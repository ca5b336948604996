"""What files say, without reading them whenever it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from preloadd.domain.files import FileIdentity

T = TypeVar("T")


class Fresh(Generic[T]):
    """What `make` makes of `files`, made anew when one of them is another, has come or gone."""

    def __init__(self, files: Iterable[Path], make: Callable[[], T]) -> None:
        self._files = tuple(files)
        self._make = make
        self._made: tuple[list[FileIdentity | None], T] | None = None

    def get(self) -> T:
        """The value as of now; whatever `make` raises, which it is asked again for next time."""
        seen = [_identity(path) for path in self._files]
        if self._made is None or self._made[0] != seen:
            self._made = None
            self._made = seen, self._make()
        return self._made[1]


def _identity(path: Path) -> FileIdentity | None:
    with suppress(OSError):
        found = path.stat()
        return FileIdentity(
            found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        )
    return None
