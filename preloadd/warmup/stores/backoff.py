"""When to try again what has failed: later each time, and never a storm of tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first` seconds after one failure, twice as long after each that follows it, at most
    `longest`. Pure: a new value comes of every event."""

    first: float
    longest: float
    failures: int = 0
    until: float = 0.0

    def failed(self, now: float) -> Backoff:
        """After a failure at `now`."""
        pause = min(self.first * 2.0 ** min(self.failures, 32), self.longest)
        return Backoff(self.first, self.longest, self.failures + 1, now + pause)

    def worked(self) -> Backoff:
        """After a success."""
        return Backoff(self.first, self.longest)

    def waits(self, now: float) -> bool:
        """Whether it is too early to try again."""
        return now < self.until
