"""A shard that is being read: through the page cache, or past it by a second descriptor."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from preloadd.errors import ReadFailed
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.linux.page_cache import holds
from preloadd.memory.api import ALIGNED
from preloadd.weights.checkpoint.reading import read_into, refused

_PROBES = 4
"""Places of a piece at which the page cache is looked into, once it did not hold all of the last
one. Each lets go of the interpreter, which other threads are waiting for."""

_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT})
"""A file system, a block size or a kind of memory with which O_DIRECT does not work."""


@contextmanager
def opened_direct(fd: int) -> Iterator[int | None]:
    """A descriptor of the same file that goes past the page cache; None where that is refused.

    OutOfDescriptors where this process may open no more.
    """
    try:
        # Not by its path, where another file may be by now.
        direct = OwnedFd(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if is_exhausted(error):
            raise exhausted(error, "opening a shard to read past the page cache") from error
        yield None
        return
    with direct:
        yield direct.fileno()


class OpenFile:
    """A shard being read, by many threads at once. Both descriptors are borrowed."""

    def __init__(self, path: Path, fd: int, direct: int | None = None) -> None:
        self.path = path
        self.fd = fd
        self._direct = direct
        self._tells = True
        self._warm = False

    @property
    def direct(self) -> bool:
        """Whether it can be read past the page cache, as far as is known."""
        return self._direct is not None

    def cached(self, offset: int, nbytes: int) -> bool | None:
        """Whether the page cache seems to hold these bytes; None where the kernel does not tell.

        Looks at few places and one byte each: a longer look would start to read what is not there.
        """
        step = max(1, (nbytes - 1) // (_PROBES - 1))
        places = range(offset, offset + nbytes, step)
        for place in places[1:2] if self._warm else places:
            found = holds(self.fd, place) if self._tells else None
            if not found:
                self._warm, self._tells = False, found is not None
                return found
        self._warm = True
        return True

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target` with what the file holds from `offset` on; ReadFailed."""
        read_into(self.fd, target, offset, self.path)

    def scatter(self, targets: Sequence[memoryview], offset: int) -> None:
        """Fill `targets` one after the other with what the file holds from `offset` on."""
        try:
            count = os.preadv(self.fd, targets, offset)
        except OSError as error:
            raise ReadFailed(refused(self.path, error)) from error
        if count == sum(map(len, targets)):
            return
        for target in targets:
            self.read(target, offset)
            offset += len(target)

    def read_direct(self, target: memoryview, offset: int, wanted: int) -> bool:
        """Fill `target` up to at least `wanted` bytes past the page cache; ReadFailed.

        `target`, its length and `offset` are multiples of ALIGNED. False if this file cannot be
        read so: then it was read through the cache after all, as it will be from now on.
        """
        done = 0
        direct = self._direct  # other threads may find out meanwhile that it does not do
        while direct is not None and done < wanted and not done % ALIGNED:
            try:
                count = os.preadv(direct, [target[done:]], offset + done)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise ReadFailed(refused(self.path, error)) from error
                self._direct = direct = None
                break
            done += count
            if not count:
                break
        if done < wanted:
            # The file is shorter than it was, which this reports, or its last block is not whole.
            with target[done:wanted] as rest:
                self.read(rest, offset + done)
        return direct is not None
