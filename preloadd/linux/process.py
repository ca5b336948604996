"""Child processes: given descriptors as systemd does, watched through a pidfd, always reaped."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from signal import SIGKILL, pidfd_send_signal, valid_signals

from preloadd.linux import trampoline
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner

_TRAMPOLINE = str(Path(trampoline.__file__))


@dataclass(frozen=True, slots=True)
class Identity:
    """Another user that a child of root's is to be: its number, its group's, and of all groups."""

    user: int
    group: int
    groups: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.user}:{self.group}:{','.join(map(str, self.groups))}"


def ending(status: int) -> str:
    """How something ended that has this `Child.status`, for people: after "it"."""
    number = status - 128
    if number in valid_signals():
        return f"was killed by signal {number}"
    return f"ended with {status}"


class Child(Owner):
    """A process this one started and must reap: by `poll`, by `wait` or by `close`.

    It leads a process group of its own, and takes that along: what it left behind is killed before
    it is reaped, while the number cannot be anybody else's.
    """

    def __init__(self, process: subprocess.Popen[bytes], pidfd: OwnedFd, failed: OwnedFd) -> None:
        self._process = process
        self._pidfd = pidfd
        self._failed = failed
        self._status: int | None = None
        self._started = True

    @property
    def pid(self) -> int:
        """The process id; once reaped, it may come to belong to another process."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """What a shell would report: the exit status, 128 + n for signal n; None until reaped."""
        return self._status

    @property
    def started(self) -> bool:
        """False once reaped if the command could not be executed, whose status is then 126 or 127.

        The status alone does not tell: a command that lacks a symbol of a library ends with 127.
        """
        return self._started

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._pidfd.fileno()

    def poll(self) -> int | None:
        """Reap the process if it has ended; its `status`."""
        if self._status is None and self._ended(0):
            self.kill_group()
            code = self._process.wait()
            self._status = code if code >= 0 else 128 - code
            with suppress(BlockingIOError), self._failed as failed:
                self._started = not os.read(failed.fileno(), 1)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, reap the process and return its status; TimeoutError."""
        if self._status is None:
            self._ended(timeout)
        status = self.poll()
        if status is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the process alone; nothing happens once it has ended."""
        if self._status is None:
            with suppress(ProcessLookupError):
                pidfd_send_signal(self._pidfd.fileno(), number)

    def kill_group(self) -> None:
        """Kill all processes of its group; nothing happens once it was reaped."""
        if self._status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, SIGKILL)

    def group_gone(self) -> bool:
        """Whether the process was reaped and nothing of its group is left.

        A kill takes effect a moment later: until then members may still write to shared memory.
        Members that nobody reaps (PID 1 of a container may not care) stay for ever.
        """
        if self._status is None:
            return False
        with suppress(ProcessLookupError):
            os.killpg(self.pid, 0)
            return False
        return True

    def close(self) -> None:
        """Kill the process and its group unless it was reaped, and reap it."""
        self.signal(SIGKILL)
        self.wait()
        self._pidfd.close()

    def _ended(self, timeout: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self._pidfd.fileno(), select.POLLIN)
        return bool(waiting.poll(None if timeout is None else timeout * 1000))


def spawn(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    fds: Sequence[tuple[str, int]] = (),
    parent_death_signal: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    identity: Identity | None = None,
    cwd: str | None = None,
) -> Child:
    """Start `argv` with the environment `environ`; the caller owns the child.

    It gets copies of the borrowed `fds` as `passed.inherited` expects them, standard input from
    nowhere, standard output and error of this process (or the borrowed `stdout` and `stderr`), and
    nothing else. `parent_death_signal` is sent to it when the *thread* that calls this ends. It is
    begun in the folder `cwd` and executed as `identity`, which need not be able to read this
    interpreter. A command that cannot be executed is not `started`.
    """
    numbers = sorted({number for _, number in fds})
    parent = os.getpid() if parent_death_signal is not None else 0
    passed = [f"{number}:{name}" for name, number in fds]
    with ExitStack() as undo, ExitStack() as lent:
        reading, writing = _pipe()
        undo.enter_context(reading)
        lent.enter_context(writing)
        process = subprocess.Popen(  # noqa: S603 the caller's own command
            [
                *(sys.executable, "-I", "-S", _TRAMPOLINE),
                *(str(identity or ""), str(parent), str(int(parent_death_signal or 0))),
                *(str(writing.fileno()), str(len(passed)), *passed),
                *argv,
            ],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=environ,
            pass_fds=[*numbers, writing.fileno()],
            # Set before this call returns, so that the group can be killed from now on.
            process_group=0,
        )
        undo.callback(process.wait)
        undo.callback(process.kill)
        pidfd = OwnedFd(os.pidfd_open(process.pid))
        undo.pop_all()
    return Child(process, pidfd, reading)


def _pipe() -> tuple[OwnedFd, OwnedFd]:
    """Its ends, to read and to write. The latter is for a child, and out of the way of standard
    streams that this process may lack."""
    reading, low = map(OwnedFd, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
    with ExitStack() as undo, low:
        undo.enter_context(reading)
        writing = OwnedFd(fcntl(low.fileno(), F_DUPFD_CLOEXEC, 3))
        undo.pop_all()
    return reading, writing
