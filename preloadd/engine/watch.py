"""Watching the daemon that granted weights, from a thread of its own, for people who read the log.

Nothing depends on it: weights stay mapped whether their daemon lives or not. Copies of weights are
nobody's business but the engine's, so there it is not watched.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from preloadd.domain.lifecycle import State
from preloadd.errors import OutOfDescriptors, PreloadError, Unavailable
from preloadd.linux.fds import exhausted, is_exhausted
from preloadd.linux.threads import starting
from preloadd.protocol.messages import Reason
from preloadd.transport.blocking import Client

log = logging.getLogger(__name__)

_READ_S = 0.1
"""Seconds for what has come already to be read."""


@dataclass(frozen=True, slots=True)
class Line:
    """How to reach a daemon again. `name` is what it is called in the log; `connect` makes a new
    connection to it, as checked as the first; `timeout` is seconds for each of its answers."""

    name: str
    connect: Callable[[], Client]
    timeout: float


def pauses() -> Iterator[float]:
    """Seconds between one try to reach a daemon and the next, without end."""
    seconds = 1.0
    while True:
        yield seconds
        seconds = min(2 * seconds, 30.0)


class Account:
    """What is to be said of a daemon as it goes and comes, each thing once.

    `generation` is that of the weights which the engine has mapped.
    """

    def __init__(self, name: str, generation: str) -> None:
        self._name = name
        self._generation = generation
        self._serves = generation
        self._gone = False

    def gone(self) -> None:
        """It hung up, or cannot be reached."""
        if not self._gone:
            log.warning(
                "the daemon of %s is gone; the weights stay mapped, this engine goes on", self._name
            )
        self._gone = True

    def told(self, state: State, generation: str) -> None:
        """It told how it is. Only what it serves is worth a word."""
        if state is not State.SERVING or not (self._gone or generation != self._serves):
            return
        self._gone, self._serves = False, generation
        if generation == self._generation:
            log.info("the daemon of %s is back with the same weights: nothing to do", self._name)
        else:
            log.warning(
                "the daemon of %s has other weights now: this engine keeps the old ones until it "
                "is restarted",
                self._name,
            )


class Watcher:
    """Owns the thread, until `stop`. PreloadError if there are no more threads or descriptors.

    `between` gives the pauses after the daemon was lost, anew each time.
    """

    def __init__(
        self, line: Line, generation: str, *, between: Callable[[], Iterator[float]] = pauses
    ) -> None:
        self._pid = os.getpid()
        try:
            self._stop, stopped = socket.socketpair()
        except OSError as error:
            if is_exhausted(error):
                raise exhausted(error, f"watching the daemon of {line.name}") from error
            raise
        rounds = _Rounds(line, Account(line.name, generation), stopped, between)
        thread = threading.Thread(
            target=rounds.run, name=f"preloadd watch {line.name}", daemon=True
        )
        try:
            with starting(f"watching the daemon of {line.name}"):
                thread.start()
        except BaseException:
            self._stop.close()
            stopped.close()
            raise

    def stop(self) -> None:
        """Have the thread end at once. It is not waited for: finalizers come here as well, in any
        thread and while it holds any lock."""
        # A child that was forked has the same connection, and no thread of it.
        if self._stop.fileno() >= 0 and os.getpid() == self._pid:
            self._stop.shutdown(socket.SHUT_RDWR)
        self._stop.close()


class _Rounds:
    """What the thread does. Owns its end of the connection over which it is told to stop."""

    def __init__(
        self,
        line: Line,
        account: Account,
        stopped: socket.socket,
        between: Callable[[], Iterator[float]],
    ) -> None:
        self._line = line
        self._account = account
        self._stopped = stopped
        self._between = between

    def run(self) -> None:
        """Watch until told to stop."""
        with self._stopped:
            try:
                self._watch()
            except Exception:
                log.exception("the daemon of %s is not watched any more", self._line.name)

    def _watch(self) -> None:
        left = self._between()
        while True:
            if self._listen():
                left = self._between()
            if self._stops_within(next(left)):
                return

    def _listen(self) -> bool:
        """Watch over one connection, until it ends or this is to stop. Whether it was told."""
        heard = False
        try:
            with self._line.connect() as client:
                client.watch(timeout=self._line.timeout)
                while not self._stops_within(None if heard else self._line.timeout, client):
                    told = client.event(timeout=_READ_S)
                    if told is None:
                        raise Unavailable("absent", f"{self._line.name} keeps silent")
                    log.debug("the daemon of %s is %s", self._line.name, told.state)
                    self._account.told(told.state, told.generation)
                    heard = True
        except (PreloadError, OSError) as error:
            self._lost(error)
        return heard

    def _lost(self, error: PreloadError | OSError) -> None:
        """What it means that a connection could not be made, or has ended."""
        log.debug("the daemon of %s: %s", self._line.name, error)
        busy = isinstance(error, Unavailable) and error.reason == Reason.BUSY
        # Neither says anything about whether the daemon is there.
        if not busy and not isinstance(error, OutOfDescriptors) and not self._stops_within(0):
            self._account.gone()

    def _stops_within(self, seconds: float | None, client: Client | None = None) -> bool:
        """Wait until this is to stop (then True), `client` was told something, or time is over."""
        waiting = select.poll()
        waiting.register(self._stopped, select.POLLIN)
        if client is not None:
            waiting.register(client.fileno(), select.POLLIN)
        ready = waiting.poll(None if seconds is None else seconds * 1000)
        return any(fd == self._stopped.fileno() for fd, _ in ready)
