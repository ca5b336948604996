"""Processes that the kernel gives to this one when their parents end, as it does to PID 1.

Nobody else can reap them, and a container whose PID 1 does not fills with zombies.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress


def reap_orphans(ours: Collection[int]) -> bool:
    """Reap the children that have ended but for `ours`, whose statuses others wait for.

    False if one of `ours` has ended and may hide others: look again once it has been reaped.
    """
    while (ended := _first_ended()) is not None:
        if ended in ours:
            return False
        with suppress(ChildProcessError):
            os.waitpid(ended, os.WNOHANG)
    return True


def _first_ended() -> int | None:
    """A child that has ended, and stays unreaped by being looked at."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found else None
