"""A child of the launcher that may live several times, one life after the other."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from preloadd.linux.notify import without_manager
from preloadd.linux.owner import Owner
from preloadd.linux.process import Child, spawn


class Process(Owner):
    """One command with its environment; owns the child that runs it, if one does."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = command
        self._environ = environ
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """The number of the process; None between lives. It is nobody else's until `end`."""
        return self._child.pid if self._child else None

    def start(self, fds: Sequence[tuple[str, int]]) -> None:
        """Begin a life with copies of the borrowed `fds`; it ends with the launcher at the latest.

        Call it in the main thread only: the kernel takes the end of the thread that spawned a
        process for the end of its parent. OSError if the system refuses another process.
        """
        self._child = spawn(
            self._command,
            fds=fds,
            environ=self._environ,
            parent_death_signal=signal.SIGKILL,
        )

    def fileno(self) -> int:
        """Readable once this life has ended; ValueError between lives."""
        return self._living().fileno()

    def end(self) -> int:
        """Wait for the end of this life and reap it; its exit status, 128 + n for signal n."""
        with self._living() as child:
            self._child = None
            return child.wait()

    def terminate(self) -> None:
        """Ask the process to end, if it lives."""
        if self._child is not None:
            self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its group, if it lives."""
        if self._child is not None:
            self._child.kill_group()

    def close(self) -> None:
        """Kill and reap what still lives."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _living(self) -> Child:
        if self._child is None:
            raise ValueError(f"{self._command[0]} does not run")
        return self._child


def child_environ(environ: Mapping[str, str], **more: str) -> dict[str, str]:
    """What a child gets of the launcher's environment, and `more`."""
    return without_manager(environ) | more
