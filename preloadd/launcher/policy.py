"""What the end of a process means for the group. Pure: time is an argument.

Exit statuses are a shell's: 128 + n for a death by signal n.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from preloadd.errors import EXIT_STATUS, ErrorCode

UNMENDABLE = frozenset(
    EXIT_STATUS[code]
    for code in (
        ErrorCode.CONFIG,
        ErrorCode.ALREADY_RUNNING,
        ErrorCode.INSECURE,
        ErrorCode.UNSUPPORTED,
        ErrorCode.NOT_FOUND,
        ErrorCode.NO_DEVICE,
        ErrorCode.CHECKPOINT,
    )
)
"""Statuses of a rank that never served after which another start would end the same way."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """A budget: `limit` restarts within `window` seconds. `granted` are the times of past ones."""

    limit: int = 5
    window: float = 60.0
    first_pause: float = 0.5
    longest_pause: float = 4.0
    granted: tuple[float, ...] = ()

    def grant(self, *, now: float) -> tuple[Restarts, float] | None:
        """The budget after one more restart and the seconds to wait before it; None: no more.

        The first comes at once, since parked weights make it cheap; then the pause doubles.
        """
        recent = tuple(time for time in self.granted if now - time < self.window)
        if len(recent) >= self.limit:
            return None
        pause = self.first_pause * 2 ** (len(recent) - 1) if recent else 0.0
        pause = min(pause, self.longest_pause)
        return replace(self, granted=(*recent, now)), pause


def mendable(status: int, *, served: bool) -> bool:
    """Whether a rank that ended so may do better when started again.

    `served` says whether it was ever ready. A clean exit is no failure: somebody asked for it.
    """
    if status == 0:
        return False
    return served or status not in UNMENDABLE


def exit_code(status: int) -> int:
    """What the launcher exits with when a rank that ended so ends the group: 1 if that was 0."""
    return status or 1


def describe(status: int) -> str:
    """How a process ended, for people."""
    if status > 128:
        try:
            return f"ended with status {status} ({signal.Signals(status - 128).name})"
        except ValueError:
            pass
    return f"ended with status {status}"
