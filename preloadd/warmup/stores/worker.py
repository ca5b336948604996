"""One store in a thread of its own, so that whoever asks can stop waiting.

What hangs in the kernel (a file system whose server is gone) or in somebody else's library cannot
be ended. The thread is left to it then, and neither calls nor the end of the process wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from preloadd.domain.lines import one_line
from preloadd.errors import PreloadError
from preloadd.linux.owner import Owner
from preloadd.linux.threads import starting
from preloadd.warmup.stores.api import Store, StoreFault

log = logging.getLogger(__name__)

T = TypeVar("T")

_Job = tuple[Callable[[Store], object], "Future[object]"]


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """What was asked of a store, and until when it is waited for."""

    future: Future[T]
    until: float


class Worker(Owner):
    """Makes a store, asks it and closes it. `deadline` are seconds for each.

    The store is made when this is; if that has not worked, `opened` and every call raise why.
    """

    def __init__(self, name: str, make: Callable[[], Store], deadline: float) -> None:
        self.name = name
        self._make = make
        self._deadline = deadline
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._opened: Future[None] = Future()
        self._hangs: Future[Any] | None = None
        self._thread = threading.Thread(target=self._run, name=f"store {name}", daemon=True)
        with starting(f"the store {name}"):
            self._thread.start()

    def opened(self) -> None:
        """Wait until the store is made, which is not waited for longer than a call.

        PreloadError or OSError if it cannot be made.
        """
        try:
            self._opened.result(self._deadline)
        except TimeoutError:
            self._hangs = self._opened

    def ask(self, what: Callable[[Store], T]) -> Asked[T]:
        """Begin to ask; `answer` waits. StoreFault if it hangs already."""
        if self._hangs is not None and not self._hangs.done():
            raise self._overdue()
        future: Future[T] = Future()
        self._jobs.put((what, future))  # type: ignore[arg-type] # whoever asks knows the type
        return Asked(future, time.monotonic() + self._deadline)

    def answer(self, asked: Asked[T]) -> T:
        """What comes of it; PreloadError or OSError, at the deadline at the latest."""
        future = asked.future
        try:
            return future.result(max(0.0, asked.until - time.monotonic()))
        except TimeoutError as error:
            if not future.done():
                if not future.cancel():  # else it waits behind what hangs
                    self._hangs = future
                raise self._overdue() from None
            raise StoreFault(f"it waited in vain: {one_line(error)}") from error

    def close(self) -> None:
        """Close the store, unless it hangs."""
        self._jobs.put(None)
        self._thread.join(self._deadline)
        if self._thread.is_alive():
            log.warning("the store %s hangs: it is left to itself", self.name)

    def _overdue(self) -> StoreFault:
        return StoreFault(f"it has not answered for {self._deadline:g} s")

    def _run(self) -> None:
        try:
            store = self._make()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the store
            self._opened.set_exception(_told(error))
            self._refuse(_told(error))
            return
        self._opened.set_result(None)
        while (job := self._jobs.get()) is not None:
            what, asked = job
            if asked.set_running_or_notify_cancel():
                try:
                    asked.set_result(what(store))
                except Exception as error:  # noqa: BLE001 - raised by whoever asked
                    asked.set_exception(_told(error))
        try:
            store.close()
        except Exception as error:  # noqa: BLE001 - nobody waits for this
            log.warning("the store %s could not be closed: %s", self.name, one_line(error))

    def _refuse(self, error: PreloadError | OSError) -> None:
        """There is no store: everybody is told why."""
        while (job := self._jobs.get()) is not None:
            if job[1].set_running_or_notify_cancel():
                job[1].set_exception(error)


def _told(error: Exception) -> PreloadError | OSError:
    """The error, or one that says of another what it was."""
    if isinstance(error, PreloadError | OSError):
        return error
    return StoreFault(f"it failed: {type(error).__name__}: {one_line(error)}")
