"""Making many objects at once, without Python's collector going over all of the engine's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block without the collector, for a moment: it would look for garbage again and again
    while thousands of objects are made that all stay."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
