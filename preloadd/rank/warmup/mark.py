"""A mark beside the socket: weights were loaded, and are not warm. It outlives the rank."""

from __future__ import annotations

import logging
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import PreloadError
from preloadd.rank import record

log = logging.getLogger(__name__)

NAME = "not-warm.txt"

_MAX_NBYTES = 1 << 12


class Mark:
    """There from when a load begins until its weights are warm. What it holds is why they are not;
    nothing if a warm-up had begun and did not end."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def begin(self) -> None:
        """A warm-up is to follow, and this process may not live until it ends."""
        self.fail("")

    def fail(self, why: str) -> None:
        """It has ended, to no good."""
        record.leave(self._path, why.encode(errors="backslashreplace"))

    def clear(self) -> None:
        """The weights are warm, or nothing is made for them."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s could not be removed: %s", self._path, error.strerror)

    def left(self) -> str | None:
        """What an earlier life has left: None where its weights are warm."""
        try:
            found = record.left(self._path)
        except (PreloadError, OSError) as error:
            return f"it is not known whether these weights are warm: {one_line(error)}"
        return None if found is None else one_line(found[:_MAX_NBYTES].decode(errors="replace"))
