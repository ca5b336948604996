"""Mapped arenas of this process: a generation is mapped once, however often it is attached.

Attachments of one generation share the mapping and have leases of their own. The last of them to
close unmaps it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from preloadd.domain.ids import DeviceId
from preloadd.linux.fds import OwnedFd
from preloadd.memory.api import DeviceBuffer, Mapper, Mapping


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two arenas the same memory: a generation lies on one device, in these chunks."""

    backend: str
    device: DeviceId
    generation: str
    chunks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Mapped:
    """One mapping, and how many attachments use it."""

    mapping: Mapping
    users: int = 0


class Arenas:
    """The registry. Its methods may be called from any thread, and by finalizers."""

    def __init__(self) -> None:
        # Reentrant: mapping makes objects, so it may set off a garbage collection, which may run
        # the finalizer of a model that lets go of its arena in this very thread.
        self._lock = threading.RLock()
        self._mapped: dict[Identity, _Mapped] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    def share(self, identity: Identity, fds: Sequence[OwnedFd], mapper: Mapper) -> Share:
        """The arena of `identity`, mapped now unless it is already; takes and closes `fds`.

        Errors as of `Mapper.map`.
        """
        with self._lock:
            mapped = self._mapped.get(identity)
            if mapped is None:
                mapping = mapper.map(list(zip(fds, identity.chunks, strict=True)))
                mapped = self._mapped[identity] = _Mapped(mapping)
            mapped.users += 1
        for fd in fds:
            fd.close()
        return Share(self, identity, mapped)

    def leave(self, identity: Identity, mapped: _Mapped, *, unmap: bool) -> None:
        """One user less; the last one unmaps, or with `unmap` false leaves that to the views."""
        with self._lock:
            if mapped.users == 1 and unmap:
                mapped.mapping.close()
            mapped.users -= 1
            if not mapped.users and self._mapped.get(identity) is mapped:
                del self._mapped[identity]


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

    def chunk(self, index: int) -> memoryview | DeviceBuffer:
        """The bytes of one chunk, read-only."""
        return self._mapping.chunk(index)

    def read(self, index: int, offset: int, nbytes: int) -> bytes:
        """A copy of some bytes of a chunk in host memory; ValueError outside of it."""
        return self._mapping.read(index, offset, nbytes)

    def close(self) -> None:
        """Leave, and unmap if nobody else is left. BufferError, and nothing done, while that is
        so and views of the arena live."""
        self._leave(unmap=True)
        self._mapped = None

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
            self._arenas.leave(self._identity, self._mapped, unmap=unmap)
            self._left = True


ARENAS = Arenas()
"""Those of this process."""
