"""A system that gives a process no more threads."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STACK = 256 << 20
"""Bytes; so many that what a test allocates besides is nothing."""


@contextmanager
def threads_left(more: int) -> Iterator[None]:
    """This process may start so many threads more, and then none: there are no addresses left."""
    before, limits = threading.stack_size(STACK), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more * STACK + STACK // 2, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        threading.stack_size(before)
