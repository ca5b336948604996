"""What one life of a rank leaves beside its socket for the next."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from preloadd.errors import InsecurePath
from preloadd.linux.plain import open_folder, read_file, staged

MAX_NBYTES = 1 << 20

log = logging.getLogger(__name__)


def leave(path: Path, content: bytes) -> None:
    """Put `content` there whole, in the place of what was; that it cannot be is no error, as the
    next life does without. To be called by whoever holds the lock of the instance."""
    try:
        with open_folder(path.parent) as folder, staged(path.name, folder, content) as fresh:
            os.replace(fresh, path.name, src_dir_fd=folder.fileno(), dst_dir_fd=folder.fileno())
    except OSError as error:
        log.warning("%s could not be written: %s", path, error.strerror)
    except InsecurePath as error:
        log.warning("%s could not be written: %s", path, error)


def left(path: Path) -> bytes | None:
    """What the life before has left there, `MAX_NBYTES` of it at most; None if there is nothing.
    InsecurePath for what is no file, which no rank has left; OSError."""
    with suppress(FileNotFoundError):
        return read_file(path, MAX_NBYTES)
    return None
