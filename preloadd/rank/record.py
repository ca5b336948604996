"""What one life of a rank leaves beside its socket for the next."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from preloadd.linux.plain import read_file

MAX_NBYTES = 1 << 20

log = logging.getLogger(__name__)


def leave(path: Path, content: bytes) -> None:
    """Put `content` there whole, in the place of what was; that it cannot be is no error, as the
    next life does without. To be called by whoever holds the lock of the instance."""
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError as error:
        log.warning("%s could not be written: %s", path, error.strerror)


def left(path: Path) -> bytes | None:
    """What the life before has left there, `MAX_NBYTES` of it at most; None if there is nothing.
    InsecurePath for what is no file, which no rank has left; OSError."""
    with suppress(FileNotFoundError):
        return read_file(path, MAX_NBYTES)
    return None
