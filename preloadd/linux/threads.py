"""Starting threads, which the system may refuse as it does descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from preloadd.errors import PreloadError


@contextmanager
def starting(doing: str) -> Iterator[None]:
    """PreloadError, which names the limits, if a thread cannot be started in the block."""
    try:
        yield
    except RuntimeError as error:  # all that `threading` tells of it
        raise PreloadError(
            f"{doing}: this process gets no more threads ({error}): raise TasksMax= of the systemd "
            "unit or the container's limit of processes (pids.max), `ulimit -u` or `ulimit -v`"
        ) from error
