"""Making many objects at once, without Python's collector going over all of the engine's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block without the collector, for a moment: it would look for garbage again and again
    while thousands of objects are made that all stay. At its end it looks at these once."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            # There are so many by now that the next one would set off a collection, and one of the
            # engine's older objects as well where that was due.
            gc.collect(0)
            gc.enable()
