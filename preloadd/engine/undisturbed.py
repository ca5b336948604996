"""Making many objects at once, without Python's collector going over all of the engine's."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block without the collector, for a moment: it would look for garbage again and again
    while thousands of objects are made that all stay. At its end it looks at these once."""
    was = gc.isenabled()
    gc.disable()
    if was:
        _ENDING.add(threading.get_ident())
    try:
        yield
    finally:
        if was:
            _ENDING.discard(threading.get_ident())
            # There are so many by now that the next one would set off a collection, and one of the
            # engine's older objects as well where that was due.
            gc.collect(0)
            gc.enable()


_ENDING: set[int] = set()
"""Threads in whose hands it is that the collector works again."""


def _forked() -> None:
    """In a child, which has none of its parent's other threads."""
    if _ENDING and threading.get_ident() not in _ENDING:
        _ENDING.clear()
        gc.enable()


os.register_at_fork(after_in_child=_forked)
