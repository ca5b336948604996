"""What a service manager does with the descriptors a service parks: keep them by name.

They stay open while the service is down and go into its next start. Those stored with polling are
dropped when their peer hangs up, so that the leases of engines that left do not pile up.
"""

from __future__ import annotations

import select
from collections.abc import Iterable

from preloadd.errors import OutOfDescriptors
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner


class FdStore(Owner):
    """Owns descriptors, several per name if need be, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stored: list[tuple[str, OwnedFd]] = []
        self._polled: set[int] = set()
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Readable when `expire` has something to drop."""
        return self._epoll.fileno()

    def add(self, name: str, fds: Iterable[OwnedFd], *, poll: bool) -> None:
        """Take `fds` and keep them as `name`; with `poll`, until their peer hangs up.

        All or none: OutOfDescriptors, and they are closed, if they would exceed the limit.
        """
        taken = list(fds)
        if len(self._stored) + len(taken) > self._limit:
            for fd in taken:
                fd.close()
            raise OutOfDescriptors(
                f"{len(taken)} more descriptors ({name}) do not fit in a store of {self._limit} "
                f"that holds {len(self._stored)}: raise the store's limit"
            )
        for fd in taken:
            self._stored.append((name, fd))
            if poll:
                self._watch(fd.fileno())

    def remove(self, name: str) -> None:
        """Close all descriptors kept as `name`."""
        self._drop([entry for entry in self._stored if entry[0] == name])

    def items(self) -> list[tuple[str, int]]:
        """Every name with a borrowed descriptor, oldest first."""
        return [(name, fd.fileno()) for name, fd in self._stored]

    def expire(self) -> list[str]:
        """Close the polled descriptors whose peer hung up; the name of each."""
        if not self._polled:
            return []
        gone = {fd for fd, _ in self._epoll.poll(0, len(self._polled))}
        entries = [entry for entry in self._stored if entry[1].fileno() in gone]
        self._drop(entries)
        return [name for name, _ in entries]

    def __len__(self) -> int:
        return len(self._stored)

    def close(self) -> None:
        """Close everything."""
        self._drop(self._stored)
        self._epoll.close()

    def _watch(self, fd: int) -> None:
        try:
            # No events: hang-up and error are told nevertheless, while data that the service has
            # not read yet would wake the loop again and again.
            self._epoll.register(fd, 0)
        except PermissionError:
            # Memory files cannot be polled, and never hang up.
            return
        self._polled.add(fd)

    def _drop(self, entries: list[tuple[str, OwnedFd]]) -> None:
        self._stored = [entry for entry in self._stored if entry not in entries]
        for _, fd in entries:
            if fd.fileno() in self._polled:
                # Closing does not do it: the service holds the same open file.
                self._epoll.unregister(fd.fileno())
                self._polled.discard(fd.fileno())
            fd.close()
