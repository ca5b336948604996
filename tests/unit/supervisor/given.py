"""What the tests of the supervisor are given: answers of ranks, and names that others chose."""

from __future__ import annotations

import os
from typing import Any

from preloadd.domain.lifecycle import State
from preloadd.protocol.messages import StatusTold

GIB = 1 << 30

HOSTILE = "\"><script>alert('x')</script>&\n\\"
"""A name that breaks whatever does not escape it."""


def told(instance: str, **fields: Any) -> StatusTold:
    """What a rank tells that serves, unless `fields` say otherwise."""
    usual = {
        "group": "g",
        "instance": instance,
        "device": instance,
        "role": "target",
        "pid": os.getpid(),
        "version": "0",
        "state": State.SERVING,
    }
    return StatusTold(**{**usual, **fields})
