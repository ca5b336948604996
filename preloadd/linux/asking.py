"""What another program says when it is run: the end of it, and how the program ended. All that it
started in its process group ends with it."""

from __future__ import annotations

import fcntl
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from signal import SIGKILL

from preloadd.domain.lines import one_line
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner
from preloadd.linux.process import Child, Identity, spawn

LONGEST = 1 << 16
"""Bytes that are kept of each stream: the last ones."""

END_S = 2.0
"""Seconds that a killed command has to be gone. A process that waits for a driver which hangs stays
until that is over."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended, 128 + n for signal n, and the end of what it wrote to its standard
    output and, if that was wanted, error. Not `started` if it could not be executed."""

    status: int
    said: bytes
    errors: bytes = b""
    started: bool = True

    @property
    def complaint(self) -> str:
        """The last line of its standard error that is not empty, fit for a terminal; '' if there
        is none."""
        lines = self.errors.decode(errors="replace").splitlines()
        return one_line(next((line.strip() for line in reversed(lines) if line.strip()), ""))


class Asked(Owner):
    """A command that runs. Nothing here waits but for `child`, which whoever drives it does.

    It is to be closed in the thread that made it, with whose end it is killed. OSError if the
    system refuses another process; a command that cannot be executed is not `started`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        errors: bool = False,
        identity: Identity | None = None,
        cwd: str | None = None,
    ) -> None:
        with ExitStack() as undo, ExitStack() as lent:
            self._streams = [_Stream(undo, lent) for _ in range(2 if errors else 1)]
            told = [stream.theirs.fileno() for stream in self._streams]
            self._ready = undo.enter_context(select.epoll())
            self.child: Child = spawn(
                command,
                environ=environ,
                parent_death_signal=SIGKILL,
                stdout=told[0],
                stderr=told[1] if errors else None,
                identity=identity,
                cwd=cwd,
            )
            undo.callback(self._end)
            self._ready.register(self.child, select.EPOLLIN)
            for stream in self._streams:
                self._ready.register(stream, select.EPOLLIN)
            self._owned = undo.pop_all()

    def fileno(self) -> int:
        """Readable when `hear` has something to do."""
        return self._ready.fileno()

    def hear(self) -> Answer | None:
        """Take what was said by now; the answer if the command has ended.

        What it left behind is killed then, and what that has to say does not count.
        """
        ready = {fd for fd, _ in self._ready.poll(0)}
        for stream in self._streams:
            if stream.fileno() in ready and not stream.read():
                self._ready.unregister(stream)
        if self.child.fileno() not in ready:
            return None
        status = self.child.wait()
        for stream in self._streams:
            stream.read()
        said, *errors = (stream.end for stream in self._streams)
        return Answer(status, said, b"".join(errors), self.child.started)

    def kill(self) -> None:
        """Kill the command and all that it started; nothing happens once it was reaped."""
        self.child.kill_group()

    def close(self) -> None:
        """Kill it, and reap it: here, or whenever it can be."""
        self._owned.close()

    def _end(self) -> None:
        if self.child.poll() is None:
            self.kill()
            threading.Thread(target=self.child.close, daemon=True).start()
        else:
            self.child.close()


class _Stream:
    """A pipe, and the end of what came through it. `theirs` is closed once it was passed on."""

    def __init__(self, undo: ExitStack, lent: ExitStack) -> None:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        self._ours = undo.enter_context(OwnedFd(ours))
        self.theirs = lent.enter_context(OwnedFd(theirs))
        # Of this end alone. A process that was left behind may hold the other one for ever.
        os.set_blocking(ours, False)
        self.end = b""

    def fileno(self) -> int:
        return self._ours.fileno()

    def read(self) -> bool:
        """Take all that is in the pipe; False at its end."""
        fd = self.fileno()
        with suppress(BlockingIOError):
            piece = os.read(fd, fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ))
            self.end = (self.end + piece)[-LONGEST:]
            return bool(piece)
        return True


def ask(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    timeout: float,
    identity: Identity | None = None,
    cwd: str | None = None,
) -> Answer:
    """What `command` answers, its standard error included. TimeoutError after `timeout` seconds.

    Whatever comes, it is killed with all that it started. OSError as of `Asked`.
    """
    until = time.monotonic() + timeout
    with Asked(command, environ, errors=True, identity=identity, cwd=cwd) as asked:
        try:
            while (answer := asked.hear()) is None:
                left = until - time.monotonic()
                if left <= 0 or not _readable(asked, left):
                    raise TimeoutError(f"{command[0]} did not finish within {timeout:g} s")
            return answer
        finally:
            asked.kill()
            _readable(asked.child, END_S)


def _readable(source: Asked | Child, timeout: float) -> bool:
    waiting = select.poll()
    waiting.register(source, select.POLLIN)
    return bool(waiting.poll(timeout * 1000))
