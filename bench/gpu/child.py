"""Processes that do one thing after the other: engines and peers, so that figures are of real ones.

They are forked from one that has imported torch and never touched a GPU: each is fresh as far as
CUDA goes, and starts in a fraction of the time. But what such a one does for the first time it does
slowly, since each page of Python's objects that it touches is copied then. Where that is what is
measured, it is started as programs are. This process itself never has a CUDA context.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Self

from preloadd.linux.owner import Owner

READY_S = 90.0
ANSWER_S = 60.0
END_S = 20.0
LONGEST = 500

_FORKED = multiprocessing.get_context("forkserver")
_STARTED = multiprocessing.get_context("spawn")


class ChildError(Exception):
    """A child ended, stayed silent, or says why it could not do it."""


class Raised(ChildError):
    """What a function raised in a child: its class, preloadd's code if it has one, its text. Where
    it was raised is a note."""

    def __init__(self, kind: str, code: str, text: str, trace: str) -> None:
        self.kind, self.code, self.text = kind, code, text
        super().__init__(f"{kind}: {' '.join(text.split())[:LONGEST]}")
        self.add_note(trace)


def prepare(modules: list[str]) -> None:
    """Start the process that children are forked from, with these modules imported."""
    _FORKED.set_forkserver_preload(modules)
    # torch's other way to count GPUs opens the driver, which no fork survives.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forkserver.ensure_running()


class Child(Owner):
    """A process to call functions in, started as a program is where `forked` is false. `environ`
    changes its environment; None removes a name."""

    def __init__(
        self, environ: Mapping[str, str | None] | None = None, *, forked: bool = True
    ) -> None:
        context = _FORKED if forked else _STARTED
        self._calls, theirs = context.Pipe()
        arguments = (theirs, dict(environ or {}))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    def __call__(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What `function` returns there; errors as of `begin` and `result`."""
        self.begin(function, *given, **named)
        return self.result()

    def begin(self, function: Callable[..., Any], *given: Any, **named: Any) -> None:
        """Have it run; `result` is to be asked for before the next call."""
        try:
            self._calls.send((function, given, named))
        except OSError:
            raise self._ended() from None

    def result(self, timeout: float = ANSWER_S) -> Any:
        """What the function that was begun returns; Raised if it raises, ChildError if its process
        ended, or there is no answer in time."""
        if not self._calls.poll(timeout):
            raise ChildError(f"process {self.pid}: no answer within {timeout:.0f} s")
        try:
            is_good, told = self._calls.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        if not is_good:
            raise Raised(*told)
        return told

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.join(END_S)

    def close(self) -> None:
        """Have it end as a program ends, by force if it does not; again, nothing."""
        if self._calls.closed:
            return
        with suppress(OSError):
            self._calls.send(None)
        self._process.join(END_S)
        self.kill()
        self._process.close()
        self._calls.close()

    def _ended(self) -> ChildError:
        self._process.join(END_S)
        code = self._process.exitcode
        how = signal.Signals(-code).name if code and code < 0 else f"exit status {code}"
        return ChildError(f"process {self.pid}: it ended with {how}")


class Actor(Child):
    """A child with one object in it, of which methods are called.

    It starts by itself; `ready` waits until the object is made.
    """

    def __init__(
        self,
        make: Callable[..., object],
        *given: object,
        environ: Mapping[str, str | None] | None = None,
        forked: bool = True,
    ) -> None:
        super().__init__(environ, forked=forked)
        self.begin(_make, make, given)

    def ready(self) -> Self:
        """Wait until it is ready; ChildError if it cannot be, or not in time."""
        self.result(READY_S)
        return self

    def ask(self, method: Callable[..., Any], *given: Any) -> Any:
        """What the method returns there; errors as of `result`."""
        return self(_call, method, given)

    def tell(self, method: Callable[..., Any], *given: Any) -> None:
        """Have it run a method; `result` is to be asked for before the next."""
        self.begin(_call, method, given)


_made: list[object] = []
"""In a child: the object of its actor."""


def _make(make: Callable[..., object], given: tuple[object, ...]) -> None:
    os.dup2(2, 1)  # what libraries print is no figure
    _made.append(make(*given))


def _call(method: Callable[..., Any], given: tuple[object, ...]) -> Any:
    return method(_made[-1], *given)


def _serve(calls: Connection, environ: Mapping[str, str | None]) -> None:
    for name, value in environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with suppress(EOFError):
        while (call := calls.recv()) is not None:
            _answer(calls, *call)
    sys.stderr.flush()


def _answer(
    calls: Connection, function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    try:
        calls.send((True, function(*given, **named)))
    except Exception as error:  # noqa: BLE001 - all is for whoever asked to see
        code = str(getattr(error, "code", ""))
        told = (type(error).__name__, code, str(error), traceback.format_exc())
        calls.send((False, told))
