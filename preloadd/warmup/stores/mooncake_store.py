"""The store in a pool of Mooncake, as a daemon has it: all work is done by a process of its own.

That process is believed to do anything at any time but to outlive this one. One that is overdue is
killed; until another is tried, calls fail at once.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace

from preloadd.errors import ConfigError
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner
from preloadd.linux.process import Child, ending, spawn
from preloadd.warmup.stores.api import MAX_NBYTES, StoreFault, require_key
from preloadd.warmup.stores.backoff import Backoff
from preloadd.warmup.stores.mooncake import CALLS, ENVIRONMENT, LIFE
from preloadd.warmup.stores.mooncake_config import VARIABLE, Config, read_config
from preloadd.warmup.stores.wire import (
    Outcome,
    Reply,
    Request,
    Verb,
    receive_reply,
    send_request,
)

KIND = "mooncake"
MODULE = "preloadd.warmup.stores.mooncake"

DEADLINE_S = 4.0
"""Less than a store has, so that killing is done within that."""

PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
IDLE_S = 60.0
"""After so long without a call the pool is left, and the ports are closed that a client listens at.
"""

_LEAVE_S = 3.0
_END_S = 0.5
_TEXT = 1 << 16
"""Bytes of a reason at most."""


def open_mooncake(argument: str, environ: Mapping[str, str], *, python: str = "") -> MooncakeStore:
    """The store that the environment configures; its process runs on `python` ('': this one).

    ConfigError, also if that Python lacks the library.
    """
    if argument:
        raise ConfigError(f"nothing is to stand behind it: {VARIABLE} names its configuration")
    return MooncakeStore(read_config(environ), environ, python=python)


class MooncakeStore(Owner):
    """Owns the process. `deadline` bounds each call, `pause` is the first before another try; after
    `idle` seconds without a call the pool is left, unless memory was lent to it.

    ConfigError if the process cannot do its work here; one that is merely slow is tried later.
    """

    name = KIND

    def __init__(
        self,
        config: Config,
        environ: Mapping[str, str],
        *,
        python: str = "",
        deadline: float = DEADLINE_S,
        pause: float = PAUSE_S,
        idle: float = IDLE_S,
    ) -> None:
        self._config = config
        self._argv = [python or sys.executable, "-P", "-m", MODULE]
        self._environ = {**ENVIRONMENT, **environ}
        self._deadline = deadline
        self._opening = Request(Verb.OPEN, idle, value=config.encode())
        self._backoff = Backoff(pause, LONGEST_PAUSE_S)
        self._why = ""
        self._client: _Client | None = None
        try:
            self._ready(time.monotonic() + deadline)
        except TimeoutError:
            self._tripped(self._slow())
        except (EOFError, OSError, _Unfit) as error:
            raise ConfigError(self._dropped(error)) from None

    def find(self, key: str, limit: int) -> bytes | None:
        """The value, None if there is none; StoreFault at the deadline at the latest."""
        require_key(key)
        reply = self._ask(Request(Verb.FIND, 0.0, key, limit=min(limit, MAX_NBYTES)))
        return bytes(reply.body) if reply.outcome is Outcome.FOUND else None

    def keep(self, key: str, value: bytes) -> None:
        """Store it, unless there is one; StoreFault at the deadline at the latest."""
        require_key(key)
        self._ask(Request(Verb.KEEP, 0.0, key, value=value))

    def replace(self, key: str, value: bytes) -> None:
        """Store it in the place of what is there; StoreFault at the deadline at the latest."""
        require_key(key)
        self._ask(Request(Verb.REPLACE, 0.0, key, value=value))

    def close(self) -> None:
        """End the process. What it lent to a pool is taken out of it first."""
        if self._client is not None:
            self._client.end(_LEAVE_S if self._config.embedded else 0.0)
            self._client = None

    def _ask(self, request: Request) -> Reply:
        now = time.monotonic()
        if self._backoff.waits(now):
            raise StoreFault(self._why)
        until = now + self._deadline
        try:
            client = self._ready(until)
            reply = client.ask(replace(request, seconds=until - time.monotonic()), until)
        except TimeoutError:
            raise self._tripped(self._slow()) from None
        except (EOFError, OSError, _Unfit) as error:
            raise self._tripped(self._dropped(error)) from None
        if reply.outcome is Outcome.DOWN:
            raise self._tripped(reply.text)
        self._backoff = self._backoff.worked()
        if reply.outcome is Outcome.REFUSED:
            raise StoreFault(reply.text)
        return reply

    def _ready(self, until: float) -> _Client:
        """The process, which has loaded the library."""
        if self._client is not None and self._client.ended:
            # Between calls: what was asked last is done, so that is no fault.
            self._drop()
        if self._client is None:
            self._client = _Client(self._argv, self._environ)
            reply = self._client.ask(self._opening, until)
            if reply.outcome is not Outcome.DONE:
                raise _Unfit(reply.text)
        return self._client

    def _tripped(self, why: str) -> StoreFault:
        """What to raise now, and again until it is time for another try."""
        self._backoff = self._backoff.failed(time.monotonic())
        self._why = why
        return StoreFault(why)

    def _slow(self) -> str:
        """Why there is no process any more."""
        self._drop()
        where = self._config.master_server_address
        return f"no answer within {self._deadline:g} s: its process was ended (master: {where})"

    def _dropped(self, error: EOFError | OSError | _Unfit) -> str:
        """The same after `error`."""
        python = self._argv[0]
        client = self._client
        status = None if client is None else client.status()
        started = client is None or client.started
        self._drop()
        if isinstance(error, _Unfit):
            return (
                f"{python} cannot load Mooncake ({error}): install one of its packages for that "
                "Python, such as mooncake-transfer-engine, and what it needs of the system"
            )
        if not started:
            return f"{python} cannot be started: name another Python"
        if status is None:
            return f"its process cannot be talked to ({error}): look into this daemon's limits"
        return f"its process {ending(status)}: see what it wrote into this log"

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class _Unfit(Exception):
    """The process has no library to work with."""


class _Client(Owner):
    """The process. It ends with this object, and with whoever has it, at once."""

    def __init__(self, argv: list[str], environ: Mapping[str, str]) -> None:
        with ExitStack() as undo, ExitStack() as lent:
            self._calls, theirs = socket.socketpair()
            undo.enter_context(self._calls)
            lent.enter_context(theirs)
            reading, writing = map(OwnedFd, os.pipe2(os.O_CLOEXEC))
            self._life = undo.enter_context(writing)
            lent.enter_context(reading)
            self._child: Child = spawn(
                argv,
                environ=environ,
                fds=[(CALLS, theirs.fileno()), (LIFE, reading.fileno())],
                # A terminal's Ctrl-C is for whoever started it.
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,
            )
            undo.pop_all()

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._child.poll() is not None

    def ask(self, request: Request, until: float) -> Reply:
        """TimeoutError; EOFError or OSError if it ended, or talks nonsense."""
        send_request(self._calls, request, until)
        return receive_reply(self._calls, max(request.limit, _TEXT), until)

    @property
    def started(self) -> bool:
        """False once `status` is known if it could not even be started."""
        return self._child.started

    def status(self) -> int | None:
        """How it ended; None if it still runs a moment after it hung up."""
        with suppress(TimeoutError):
            return self._child.wait(_END_S)
        return None

    def end(self, grace: float) -> None:
        """Have it end by itself within so many seconds, else kill it."""
        self._calls.close()
        if grace:
            with suppress(TimeoutError):
                self._child.wait(grace)
        self.close()

    def close(self) -> None:
        """Kill it, if it has not ended."""
        with self._life, self._calls:
            self._child.close()
