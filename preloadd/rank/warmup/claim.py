"""Whose engine compiles in a cache root, so that groups do not take each other's code for their
own."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from preloadd.errors import AlreadyRunning
from preloadd.linux.locks import Lock
from preloadd.linux.owner import Owner

NAME = "preloadd-warm-up.lock"


class Claim(Owner):
    """Owns the lock of a root once a thread has taken it, which may come after it is closed: then
    the lock is let go at once."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock: Lock | None = None
        self._closed = False

    def take(self, root: Path) -> bool:
        """Have what is compiled in `root` from now on be this group's alone; False if it is
        another's already, or nobody wants it any more. Blocking; PreloadError, OSError."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(AlreadyRunning):
            lock = Lock.take(root, "a warm-up", NAME)
            with self._turn:
                if not self._closed:
                    self._lock = lock
                    return True
            lock.close()
        return False

    def close(self) -> None:
        """Others may compile there, now and whenever the lock is taken after all."""
        with self._turn:
            self._closed = True
            if self._lock is not None:
                self._lock.close()
