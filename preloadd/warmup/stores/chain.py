"""Several stores as one: asked in their order, given everything, and never an obstacle."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from preloadd.domain.lines import one_line
from preloadd.errors import PreloadError
from preloadd.linux.owner import Owner
from preloadd.warmup.stores.api import MAX_NBYTES, Fit, Store, StoreFault, require_key, too_long
from preloadd.warmup.stores.worker import Worker

log = logging.getLogger(__name__)

_MAX_TOLD = 64


class Stores(Owner):
    """Owns its workers. May be used from several threads.

    No call takes longer than the deadline of each store in the chain, or raises for a fault of any;
    ValueError for what is no key. A store that hangs delays one call, not those that follow.
    """

    def __init__(self, workers: Sequence[Worker] = ()) -> None:
        self._workers = tuple(workers)
        self._faults: dict[Worker, str] = {}
        self._unfit: set[tuple[Worker, str]] = set()
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they are asked."""
        return tuple(worker.name for worker in self._workers)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong now: one line for each store that failed when it was asked last."""
        with self._lock:
            return tuple(f"{one.name}: {why}" for one, why in self._faults.items())

    def find(self, key: str, limit: int = MAX_NBYTES, fit: Fit | None = None) -> bytes | None:
        """The value of the first store that has one for `key`, of at most `limit` bytes.

        One that is not `fit` for its caller hides none of the stores that follow, and is told once.
        """
        require_key(key)
        for worker in self._workers:
            try:
                found = worker.answer(worker.ask(lambda store: store.find(key, limit)))
                if found is not None and len(found) > limit:
                    raise too_long(len(found), limit)
            except (PreloadError, OSError) as error:
                self._failed(worker, error)
                continue
            self._worked(worker)
            if found is not None:
                if fit is None or fit(found):
                    return found
                self._passed(worker, key)
        return None

    def keep(self, key: str, value: bytes, fit: Fit | None = None) -> None:
        """Give the value to all stores, at once; what one has already stays.

        With `fit`, which a thread of each store calls, all that they have is read, and what is not
        fit is replaced.
        """
        require_key(key)
        give = partial(_give, key=key, value=value, fit=fit)
        asked = []
        for worker in self._workers:
            try:
                if not 0 < len(value) <= MAX_NBYTES:
                    raise _unkept(len(value))
                asked.append((worker, worker.ask(give)))
            except (PreloadError, OSError) as error:
                self._failed(worker, error)
        for worker, future in asked:
            try:
                worker.answer(future)
            except (PreloadError, OSError) as error:
                self._failed(worker, error)
            else:
                self._worked(worker)

    def close(self) -> None:
        """Close all stores; one that hangs is left behind."""
        with ExitStack() as undo:
            for worker in self._workers:
                undo.callback(worker.close)

    def _failed(self, worker: Worker, error: PreloadError | OSError) -> None:
        """Tell it unless it is what was wrong before."""
        why = one_line(error)
        with self._lock:
            known = self._faults.get(worker) == why
            self._faults[worker] = why
        if not known:
            log.warning("the store %s is passed over: %s", worker.name, why)

    def _passed(self, worker: Worker, key: str) -> None:
        with self._lock:
            new = (worker, key) not in self._unfit and len(self._unfit) < _MAX_TOLD
            if new:
                self._unfit.add((worker, key))
        if new:
            log.warning(
                "what the store %s has under %s is of no use here, and passed over: remove it "
                "there if it is of none elsewhere",
                worker.name,
                key,
            )

    def _worked(self, worker: Worker) -> None:
        with self._lock:
            was = self._faults.pop(worker, None)
        if was is not None:
            log.info("the store %s is of use again", worker.name)


def _give(store: Store, key: str, value: bytes, fit: Fit | None) -> None:
    there = None if fit is None else store.find(key, MAX_NBYTES)
    if there is None or fit is None:
        store.keep(key, value)
    elif not fit(there):
        store.replace(key, value)
        log.warning("what the store %s had under %s was damaged: replaced", store.name, key)


def _unkept(nbytes: int) -> StoreFault:
    if not nbytes:
        return StoreFault("nothing is no value")
    return too_long(nbytes, MAX_NBYTES)
