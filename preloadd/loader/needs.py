"""What a loader needs of its Python beside this package, told in one line where it is not there.

An engine's Python need not have preloadd: it is lent. So nothing is imported here that needs more
than Python itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TextIO

from preloadd.errors import ConfigError

PACKAGES = ("blake3", "msgspec")
PROBE = "--probe"  # as in transport.probe, which needs more


def lacking(error: ImportError, arguments: Sequence[str], out: TextIO, err: TextIO) -> int:
    """Say what is missing; the exit status. To who only asks for GPUs, that is an answer."""
    why = (
        f"{sys.executable} cannot run a loader ({error}): install the packages "
        f"{' and '.join(PACKAGES)} into it, or name another interpreter (--python, or `python` in "
        "the group's file)"
    )
    if list(arguments) == [PROBE]:
        out.write(f"{json.dumps({'problem': why, 'answered': False})}\n")
        return 0
    err.write(f"preloadd-loader: {why}\n")
    return ConfigError().exit_status
