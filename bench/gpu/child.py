"""Processes that do one thing after the other: engines and peers, so that figures are of real ones.

They are forked from one that has imported torch and never touched a GPU: each is fresh as far as
CUDA goes, and starts in a fraction of the time. This process itself never has a CUDA context.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Self

READY_S = 90.0
ANSWER_S = 60.0
END_S = 10.0

_CONTEXT = multiprocessing.get_context("forkserver")


class ChildError(Exception):
    """A child ended, stayed silent, or says why it could not do it."""


def prepare(modules: list[str]) -> None:
    """Start the process that children are forked from, with these modules imported."""
    _CONTEXT.set_forkserver_preload(modules)
    # torch's other way to count GPUs opens the driver, which no fork survives.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forkserver.ensure_running()


class Child:
    """One process with one object in it, as long as the block lasts; calls are its methods.

    It starts by itself; `ready` waits until the object is made.
    """

    def __init__(
        self, make: Callable[..., object], *given: object, environ: Mapping[str, str] | None = None
    ) -> None:
        self.name = getattr(make, "__name__", str(make))
        self._calls, theirs = _CONTEXT.Pipe()
        arguments = (theirs, make, given, dict(environ or {}))
        self._process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    def ready(self, timeout: float = READY_S) -> Self:
        """Wait until it is ready; ChildError if it cannot be, or not in time."""
        self.answer(timeout)
        return self

    def ask(self, method: Callable[..., Any], *given: Any, timeout: float = ANSWER_S) -> Any:
        """What the method returns there; ChildError if it raises, or there is no answer in time."""
        self.tell(method, *given)
        return self.answer(timeout)

    def tell(self, method: Callable[..., Any], *given: Any) -> None:
        """Have it run a method; `answer` is to be asked for before the next."""
        try:
            self._calls.send((method, given))
        except OSError:
            raise self._ended() from None

    def answer(self, timeout: float = ANSWER_S) -> Any:
        """What comes of what it was told."""
        if not self._calls.poll(timeout):
            raise ChildError(f"{self.name}: no answer within {timeout:.0f} s")
        try:
            good, told = self._calls.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        if not good:
            raise ChildError(f"{self.name}: {told}")
        return told

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.join(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Have it end as a program ends; by force if it does not."""
        with contextlib.suppress(OSError):
            self._calls.send(None)
        self._process.join(END_S)
        self.kill()
        self._calls.close()

    def _ended(self) -> ChildError:
        self._process.join(END_S)
        code = self._process.exitcode
        how = signal.Signals(-code).name if code and code < 0 else f"exit status {code}"
        return ChildError(f"{self.name}: it ended with {how}")


def _serve(
    calls: Connection,
    make: Callable[..., object],
    given: tuple[object, ...],
    environ: dict[str, str],
) -> None:
    os.environ.update(environ)
    os.dup2(2, 1)  # what libraries print is no figure
    made = _answer(calls, make, given)
    with contextlib.suppress(EOFError):
        while made is not None and (call := calls.recv()) is not None:
            method, arguments = call
            _answer(calls, method, (made, *arguments), keep=False)
    sys.stderr.flush()


def _answer(
    calls: Connection, act: Callable[..., Any], given: tuple[object, ...], *, keep: bool = True
) -> Any:
    """Run, and send what comes of it, or that it is made and kept here."""
    try:
        found = act(*given)
        calls.send((True, None if keep else found))
    except Exception as error:  # noqa: BLE001 - whoever asked is told
        text = " ".join(str(error).split())
        calls.send((False, f"{type(error).__name__}: {text[:500]}"))
        return None
    return found
