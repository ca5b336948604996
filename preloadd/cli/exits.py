"""What `preloadctl` may end with, besides the statuses of `errors.EXIT_STATUS`. Stable."""

from __future__ import annotations

from enum import IntEnum

from preloadd.errors import PreloadError


class Exit(IntEnum):
    """Exit statuses that scripts may rely on."""

    DONE = 0
    NOT_SERVING = 1
    USAGE = 2
    NOTHING_THERE = 3
    IN_USE = 4
    TIMED_OUT = 5
    UNSUPPORTED = 64
    NOT_FOUND = 66
    INTERRUPTED = 130
    BROKEN_PIPE = 141


MEANINGS: dict[Exit, str] = {
    Exit.DONE: "done; `status`: every rank serves",
    Exit.NOT_SERVING: "something does not serve, or did not come up",
    Exit.USAGE: "wrong command line",
    Exit.NOTHING_THERE: "there is no group and no rank on this host",
    Exit.IN_USE: "refused, because engines hold the weights",
    Exit.TIMED_OUT: "the time of `--timeout` ran out; what was begun goes on",
    Exit.UNSUPPORTED: "this group cannot be treated so; the text says why",
    Exit.NOT_FOUND: "there is no group or instance of that name",
    Exit.INTERRUPTED: "interrupted (Ctrl-C); what was begun goes on",
    Exit.BROKEN_PIPE: "whoever read the output went away",
}
"""One line each, for the documents."""


class CommandFailed(PreloadError):
    """A command did not do what was asked, for a reason that has an exit status of its own."""

    def __init__(self, message: str, status: Exit) -> None:
        self._status = status
        super().__init__(message)

    @property
    def exit_status(self) -> int:
        """The status that says why."""
        return self._status
