"""Mapped arenas of this process: a generation is mapped once, however often it is attached.

Attachments of one generation share the mapping and have leases of their own. The last of them to
close unmaps it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet, WeakValueDictionary

from preloadd.domain.ids import DeviceId
from preloadd.linux.fds import OwnedFd
from preloadd.memory.api import DeviceBuffer, Mapper, Mapping


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two arenas the same memory: a generation lies on one device, in these chunks.

    One that is mapped `private` may have been written to, so it is another one than the shared.
    """

    backend: str
    device: DeviceId
    generation: str
    chunks: tuple[int, ...]
    private: bool = False


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Mapped:
    """One mapping, and the attachments that use it."""

    mapping: Mapping
    users: WeakSet[Share] = field(default_factory=WeakSet)


class Arenas:
    """The registry. Its methods may be called from any thread, and by finalizers.

    It keeps no arena itself: one whose shares were dropped without being closed, as an interrupt
    may do, goes with the last of them.
    """

    def __init__(self) -> None:
        # Reentrant: mapping makes objects, so it may set off a garbage collection, which may run
        # the finalizer of a model that lets go of its arena in this very thread.
        self._lock = threading.RLock()
        self._mapped: WeakValueDictionary[Identity, _Mapped] = WeakValueDictionary()

    def guard_forks(self) -> None:
        """From now on nobody forks this process while another thread maps or unmaps: in the child,
        what that had begun would never end."""
        os.register_at_fork(
            before=self._lock.acquire,
            after_in_parent=self._lock.release,
            after_in_child=self._lock.release,
        )

    def __len__(self) -> int:
        return len(self._mapped)

    def share(self, identity: Identity, fds: Sequence[OwnedFd], mapper: Mapper) -> Share:
        """The arena of `identity`, mapped now unless it is already; takes and closes `fds`.

        Errors as of `Mapper.map`.
        """
        with ExitStack() as always:
            for fd in fds:
                always.callback(fd.close)
            with self._lock:
                # What a private mapping shows is what its own user wrote there.
                mapped = None if identity.private else self._mapped.get(identity)
                if mapped is None:
                    mapped = _Mapped(mapper.map(list(zip(fds, identity.chunks, strict=True))))
                    if not identity.private:
                        self._mapped[identity] = mapped
                share = Share(self, identity, mapped)
                mapped.users.add(share)
        return share

    def leave(self, identity: Identity, mapped: _Mapped, user: Share, *, unmap: bool) -> None:
        """One user less; the last one unmaps, or with `unmap` false leaves that to the views.

        BufferError, and nothing done, as of `Mapping.close`; what else that raises passes through,
        and nobody finds the arena any more.
        """

        def left() -> None:
            mapped.users.discard(user)
            if not mapped.users and self._mapped.get(identity) is mapped:
                del self._mapped[identity]

        with self._lock, unless_in_use(left):
            if unmap and len(mapped.users) == 1:
                mapped.mapping.close()


class Share:
    """One attachment's part in a mapped arena. Implements `memory.api.Mapping`."""

    def __init__(self, arenas: Arenas, identity: Identity, mapped: _Mapped) -> None:
        self._arenas = arenas
        self._identity = identity
        self._mapped: _Mapped | None = mapped
        self._left = False

    @property
    def writable(self) -> bool:
        """What the mapping says: False."""
        return self._mapping.writable

    @property
    def private_nbytes(self) -> int:
        """Bytes that this process wrote to, whichever attachment's views it used for that."""
        return self._mapping.private_nbytes

    def room(self) -> tuple[int, str]:
        """Bytes free where the arena lies, and what bounds them."""
        return self._mapping.room()

    def chunk(self, index: int) -> memoryview | DeviceBuffer:
        """The bytes of one chunk, read-only unless mapped private."""
        return self._mapping.chunk(index)

    def read(self, index: int, offset: int, nbytes: int) -> bytes:
        """A copy of some bytes of a chunk in host memory; ValueError outside of it."""
        return self._mapping.read(index, offset, nbytes)

    def close(self) -> None:
        """Leave, and unmap if nobody else is left. BufferError, and nothing done, while that is
        so and views of the arena live. DeviceFailed at most once: it is closed then as well."""
        with unless_in_use(self._forget):
            self._leave(unmap=True)

    def abandon(self) -> None:
        """Leave. If nobody else is left, the arena is unmapped with this and the last view."""
        self._leave(unmap=False)

    @property
    def _mapping(self) -> Mapping:
        if self._mapped is None:
            raise ValueError("these weights were closed")
        return self._mapped.mapping

    def _leave(self, *, unmap: bool) -> None:
        if self._mapped is not None and not self._left:
            self._arenas.leave(self._identity, self._mapped, self, unmap=unmap)
            self._left = True

    def _forget(self) -> None:
        self._mapped = None


@contextmanager
def unless_in_use(then: Callable[[], object]) -> Iterator[None]:
    """Around what gives up a mapping: do `then` after it, also if it fails, but not if it refuses.

    A BufferError is its refusal: memory is in use, and everything stays as it was.
    """
    with ExitStack() as ending:
        ending.callback(then)
        try:
            yield
        except BufferError:
            ending.pop_all()
            raise


ARENAS = Arenas()
"""Those of this process."""
ARENAS.guard_forks()
