"""How long tests wait, and how they do where nothing tells when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 20.0
"""How long anything may take on a busy machine before it counts as never.

A test of what takes longer sets it here: who waits looks it up at the time.
"""


def eventually(seen: Callable[[], object], what: Callable[[], str]) -> None:
    """Wait until `seen` holds, of which nothing tells but asking."""
    deadline = time.monotonic() + PATIENCE_S
    while not seen():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S:g} s: {what()}"
        time.sleep(0.005)
