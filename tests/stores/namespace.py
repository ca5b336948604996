"""A network of one's own for a while: what is started meanwhile has nothing but its loopback.

Mooncake's clients listen on all interfaces, which is none of the machine's business.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNET = 0x40000000


class NoNetwork(Exception):
    """It cannot be made here; the text says what is missing."""


@contextmanager
def own_network() -> Iterator[None]:
    """For this thread, and for threads and processes that it starts. NoNetwork."""
    if shutil.which("ip") is None:
        raise NoNetwork("ip is missing: install iproute2")
    with Path("/proc/thread-self/ns/net").open() as before:
        _call("unshare", CLONE_NEWNET)
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            _call("setns", before.fileno(), CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        why = os.strerror(ctypes.get_errno())
        raise NoNetwork(f"a network of its own is refused ({why}): run this as root")
