"""Processes that use the GPU, so that the tests' own never does and keeps no memory of it.

They are forked from one that has imported torch and has not touched the driver. Each runs functions
of `tests.gpu.inside`, whose modules keep what one call leaves for the next.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Self

PATIENCE_S = 60.0
"""How long one call may take."""

_CONTEXT = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Start the process that others are forked from. It ends with this one."""
    _CONTEXT.set_forkserver_preload(["tests.gpu.inside.engine"])
    # The other way to count GPUs opens the driver, which no fork survives.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forkserver.ensure_running()


class Raised(Exception):
    """What a function raised in a child: the name of its class, preloadd's code if it has one."""

    def __init__(self, kind: str, code: str, text: str, trace: str) -> None:
        self.kind, self.code, self.text = kind, code, text
        super().__init__(f"{kind}: {text}\n{trace}")


class Child:
    """A process to call functions in. `environ` changes its environment; None removes a name."""

    def __init__(self, environ: Mapping[str, str | None] = {}) -> None:
        self._calls, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, dict(environ)), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    def __call__(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What `function` returns there; Raised if it raises."""
        self.begin(function, *given, **named)
        return self.result()

    def begin(self, function: Callable[..., Any], *given: Any, **named: Any) -> None:
        """Have it run; `result` is to be asked for before the next call."""
        self._calls.send((function, given, named))

    def result(self) -> Any:
        """What the function that was begun returns; Raised if it raises, or its process ended."""
        if not self._calls.poll(PATIENCE_S):
            raise TimeoutError(f"process {self.pid} does not answer")
        try:
            is_good, told = self._calls.recv()
        except EOFError:
            self._process.join(PATIENCE_S)
            raise Raised("Ended", "", f"exit {self._process.exitcode}", "") from None
        if not is_good:
            raise Raised(*told)
        return told

    def kill(self) -> None:
        """End it without a word to it."""
        self._process.kill()
        self._process.join(PATIENCE_S)

    def close(self) -> None:
        """Have it end; again, nothing."""
        if self._calls.closed:
            return
        with suppress(OSError):
            self._calls.send(None)
        self._process.join(PATIENCE_S)
        self.kill()
        self._process.close()
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(calls: Connection, environ: Mapping[str, str | None]) -> None:
    for name, value in environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with suppress(EOFError):
        while (call := calls.recv()) is not None:
            function, given, named = call
            try:
                calls.send((True, function(*given, **named)))
            except Exception as error:  # noqa: BLE001 - all is for the caller to see
                code = str(getattr(error, "code", ""))
                told = (type(error).__name__, code, str(error), traceback.format_exc())
                calls.send((False, told))
