"""Parking: a second copy of the descriptors with the service manager, so that we may die.

A manager that hangs (systemd does while it re-executes itself) must not hold up clients: what it
is told goes through one queue, in order, and is sent by a worker thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio

from preloadd.domain.ids import LeaseId, lease_id
from preloadd.domain.leases import PROFILING, Lease
from preloadd.errors import ProtocolViolation
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed, sealed_bytes
from preloadd.linux.notify import Notifier
from preloadd.rank.generation import Generation, chunk_name, manifest_name
from preloadd.transport.accepting import Episode
from preloadd.transport.threads import Threads

log = logging.getLogger(__name__)

LISTENER = "listen"
RELEASED = "released"
"""Marks that an operator freed the weights: the next life is not to load them by itself."""

BARRIER_S = 10.0
_MAX_MARK = 64
MOST_WAITING = 1024
"""Orders that may wait for a manager that hangs; leases beyond are not parked."""


@dataclass(slots=True, eq=False)
class _Order:
    """One thing to tell the manager, and the descriptor to give it. `failure` is what came of it
    once `done` is set."""

    act: Callable[[], None]
    fd: OwnedFd | None = None
    begun: bool = False
    done: anyio.Event = field(default_factory=anyio.Event)
    failure: OSError | None = None
    _claim: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Do it, unless it was called off; in a thread, which nobody may wait for any more."""
        if self._claim.acquire(blocking=False):
            self.act()

    def call_off(self) -> None:
        """See to it that it is not done, if it has not begun in its thread."""
        if self._claim.acquire(blocking=False):
            self.close()

    def close(self) -> None:
        """Give up the descriptor; an order that was not begun by now does nothing."""
        if self.fd is not None:
            self.fd.close()


class Parking:
    """Says what to keep and what to drop; the manager behind `notifier` does it.

    Clients cause much of that: what goes wrong there is logged when it begins, not for each.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        # Not a stream of anyio's: that loses what it hands to a task that is cancelled meanwhile,
        # and with it a descriptor.
        self._waiting: deque[_Order] = deque()
        self._more = anyio.Event()
        self._passing: dict[str, _Order] = {}
        self._threads = Threads("the service manager")
        self._behind = Episode()
        self._failing = Episode()
        self._unparked = Episode()

    async def work(self) -> None:
        """Carry out what is told below, until cancelled. To be run once, beside everything else."""
        try:
            while True:
                while self._waiting:
                    await self._carry_out(self._waiting.popleft())
                if self._behind.ends():
                    log.info("the service manager has caught up: what is new is parked again")
                self._more = anyio.Event()
                await self._more.wait()
        finally:
            for order in self._waiting:
                order.close()

    async def _carry_out(self, order: _Order) -> None:
        order.begun = True
        try:
            await self._threads.run(order.run)
        except OSError as error:
            order.failure = error
            if self._failing.begins():
                log.warning("the service manager could not be told what to keep: %s", error)
        else:
            if self._failing.ends():
                log.info("the service manager is told again what to keep")
        finally:
            order.call_off()
        order.done.set()

    async def commit(self, generation: Generation) -> None:
        """Park a generation: chunks first, manifest last, so that a manifest has all its chunks.

        Returns when the manager has taken all of it; OSError if any of it could not be told.
        """
        orders = [
            self._keep(chunk_name(generation.id, index), fd.fileno(), poll=False)
            for index, fd in enumerate(generation.chunks)
        ]
        name = manifest_name(generation.id)
        orders.append(self._keep(name, generation.sealed.fileno(), poll=False))
        await self.settle()
        _require(orders)

    async def settle(self) -> None:
        """Wait until the manager has done all it was told; TimeoutError, OSError."""
        order = self._tell(partial(self._notifier.barrier, BARRIER_S))
        await order.done.wait()
        _require([order])

    async def told(self) -> None:
        """Wait until the manager was told all this, whether it has done it or not."""
        if self._waiting:
            await self._waiting[-1].done.wait()

    def evict(self, generation: Generation) -> None:
        """Have a generation dropped, manifest first, so that none is left without its chunks."""
        names = [chunk_name(generation.id, index) for index in range(len(generation.chunks))]
        self.drop([manifest_name(generation.id), *names])

    def drop(self, names: Sequence[str]) -> None:
        """Have everything under these names closed."""
        for name in names:
            self._tell(partial(self._notifier.remove, name))

    def keep_listener(self, fd: int) -> None:
        """Park the listening socket, so that no engine meets a refused connection on a restart."""
        self._keep(LISTENER, fd, poll=False)

    async def keep(self, name: str, fd: int) -> None:
        """Park one more descriptor; OSError if the manager could not be told."""
        order = self._keep(name, fd, poll=False)
        await self.settle()
        _require([order])

    def mark_released(self) -> None:
        """Have the next life know that the weights were freed on purpose."""
        with sealed_bytes(RELEASED, b"") as mark:
            self._keep(RELEASED, mark.fileno(), poll=False)

    def keep_lease(self, lease: Lease, fd: int) -> None:
        """Park a lease's connection. The manager drops it by itself once the engine hangs up.

        A lease that cannot be parked is granted all the same: it ends with this process.
        """
        what = f"the lease of {lease.client} will not outlive this daemon"
        self._pass_on(lease.fdname, what, partial(self._keep, lease.fdname, fd, poll=True))

    def drop_lease(self, lease: Lease) -> None:
        """Have a lease's connection closed: an engine is hung up on with the last copy of it."""
        self._drop_passing(lease.fdname)

    def mark_profiling(self, lease: LeaseId, until: float) -> None:
        """Have a life that may come before the monotonic time `until` know that a lease profiles.

        Where that cannot be parked, this life knows it all the same.
        """
        name = profiling_name(lease)

        def keep() -> _Order:
            with sealed_bytes(name, repr(until).encode()) as mark:
                return self._keep(name, mark.fileno(), poll=False)

        self._pass_on(name, f"{name} is not parked", keep)

    def drop_profiling(self, lease: LeaseId) -> None:
        """Have that mark closed."""
        self._drop_passing(profiling_name(lease))

    def _pass_on(self, name: str, otherwise: str, keep: Callable[[], _Order]) -> None:
        """Park what a client is the cause of, if that can be; `otherwise` says what if not."""
        if len(self._waiting) >= MOST_WAITING:
            if self._behind.begins():
                log.warning(
                    "the service manager is behind: until it has caught up, neither new leases nor "
                    "marks of engines that measure memory will outlive this daemon"
                )
            return
        try:
            self._passing[name] = keep()
        except OSError as error:
            if self._unparked.begins():
                log.warning("%s: %s", otherwise, error)

    def _drop_passing(self, name: str) -> None:
        """Have closed what a client was the cause of.

        A copy that still waits for the manager is closed at once, or clients that come and go would
        use up all descriptors while it hangs.
        """
        waiting = self._passing.pop(name, None)
        if waiting is not None and not waiting.begun:
            waiting.close()
        self.drop([name])

    async def ready(self) -> None:
        """Tell the manager that this rank serves, after all that was told before. OSError."""
        order = self._tell(self._notifier.ready)
        await order.done.wait()
        _require([order])

    def _keep(self, name: str, fd: int, *, poll: bool) -> _Order:
        # A duplicate, because the borrowed descriptor may be closed before its turn comes.
        copy = OwnedFd.copy_of(fd)
        return self._tell(partial(self._store, name, copy, poll=poll), copy)

    def _store(self, name: str, copy: OwnedFd, *, poll: bool) -> None:
        # Closed here, in the thread that uses it, even if nobody waits for it any more.
        with copy:
            if not copy.closed:
                self._notifier.store(name, [copy.fileno()], poll=poll)

    def _tell(self, act: Callable[[], None], fd: OwnedFd | None = None) -> _Order:
        order = _Order(act, fd)
        self._waiting.append(order)
        self._more.set()
        return order


def profiling_name(lease: LeaseId) -> str:
    """Under which name it is parked that a lease profiles."""
    return f"{PROFILING}{lease}"


def parked_profiling(name: str, fd: OwnedFd) -> tuple[LeaseId, float]:
    """The lease that was marked as `name`, and until when; takes `fd`. ValueError if it is none."""
    with fd:
        try:
            until = float(read_sealed(fd.fileno(), _MAX_MARK))
        except ProtocolViolation as error:
            raise ValueError(str(error)) from error
    return lease_id(name.removeprefix(PROFILING)), until


def _require(orders: Sequence[_Order]) -> None:
    """Raise the first failure among orders that are done."""
    for order in orders:
        if order.failure is not None:
            raise order.failure
