"""Host memory: a chunk is a memfd that its filler maps writable, everybody else read-only.

After sealing, nobody can change a chunk: not through the descriptor, not through a new mapping,
not by opening /proc/PID/fd again. An engine that must write may map it private: then the kernel
copies each page before it changes. Only a writable mapping that exists already could, which is why
the keeper seals when the filler and its children are gone, and the filler keeps mappings from
children.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType

from preloadd.errors import DamagedManifest, OutOfRoom, PreloadError
from preloadd.linux import memfd
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.linux.owner import Owner
from preloadd.linux.room import room
from preloadd.memory.api import PIECE, Rows

MOST_THREADS = 8
"""More readers than this gain nothing: copying out of the page cache is bound by the memory."""

File = tuple[str, str]
"""Device and inode, as /proc/PID/smaps writes them."""

_SEALS = memfd.FIXED_SIZE | memfd.SEAL_FUTURE_WRITE | memfd.SEAL_SEAL


class HostFiller:
    """Makes chunks in the memory of this host. Implements `memory.api.Filler`."""

    @property
    def granularity(self) -> int:
        """The page size."""
        return mmap.PAGESIZE

    @property
    def staged(self) -> bool:
        """False: what is read goes straight into its place."""
        return False

    @property
    def threads(self) -> int:
        """One for each processor, up to MOST_THREADS."""
        return min(MOST_THREADS, os.cpu_count() or 1)

    def room(self) -> tuple[int, str]:
        """What MemAvailable and the cgroups leave."""
        return room()

    def available(self) -> int:
        """That in bytes."""
        return room()[0]

    def writing(self) -> AbstractContextManager[object]:
        """Nothing: there is nothing to prepare."""
        return nullcontext()

    def create(self, nbytes: int) -> HostChunk:
        """A zero-filled chunk with all its pages allocated; OutOfRoom, OutOfDescriptors."""
        if nbytes <= 0 or nbytes % self.granularity:
            raise ValueError(f"{nbytes} is no positive multiple of {self.granularity} bytes")
        with _translated(nbytes), ExitStack() as undo:
            fd = memfd.create("preloadd-chunk")
            undo.callback(fd.close)
            os.ftruncate(fd.fileno(), nbytes)
            # Allocated now, so that a lack of memory is an error here and not a SIGBUS in a copy
            # later (only at a cgroup's limit the kernel kills all the same: see `room`). It costs
            # 0.25 s a GiB; one thread that fills the chunk wins that back, as its copies then meet
            # no page faults.
            os.posix_fallocate(fd.fileno(), 0, nbytes)
            area = mmap.mmap(fd.fileno(), nbytes, flags=mmap.MAP_SHARED)
            undo.callback(area.close)
            area.madvise(mmap.MADV_DONTFORK)
            # Or a core dump would hold the weights, as it does all memory without a path.
            area.madvise(mmap.MADV_DONTDUMP)
            undo.pop_all()
        return HostChunk(fd, area)

    def close(self) -> None:
        """Nothing: a filler of host memory owns nothing."""


class HostChunk(Owner):
    """A chunk under construction. Implements `memory.api.WritableChunk`."""

    def __init__(self, fd: OwnedFd, area: mmap.mmap) -> None:
        self._fd = fd
        self._area = area

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self._area)

    @property
    def fd(self) -> OwnedFd:
        """The memfd, owned by the chunk."""
        return self._fd

    def write(
        self, target: int, span: int, rows: Rows, read: Callable[[memoryview], object]
    ) -> None:
        """See `memory.api.WritableChunk`. Only a span with bytes that are not wanted is copied."""
        if target < 0 or target + rows.total > self.nbytes:
            raise ValueError(f"no {rows.total} bytes at {target} in a chunk of {self.nbytes}")
        rows.check(span)
        with memoryview(self._area)[target : target + rows.total] as place:
            if rows.total == span:
                read(place)
            else:
                _copy_rows(place, span, rows, read)

    def finish(self) -> None:
        """Nothing: what was written is there."""

    def close(self) -> None:
        """Unmap and close the descriptor; BufferError, and nothing done, while a window lives."""
        self._area.close()
        self._fd.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # Windows may live on in the frames of the error, which a BufferError must not hide. The
        # mapping goes with the last of them.
        self._fd.close()
        with suppress(BufferError):
            self._area.close()


class HostKeeper:
    """Proves and seals chunks by their descriptors alone. Implements `memory.api.Keeper`."""

    def seal(self, fd: int, nbytes: int) -> None:
        """Seal a chunk whose filler is gone; DamagedManifest if it is no chunk of `nbytes`."""
        try:
            if _seals(fd) & _SEALS != _SEALS:
                memfd.seal(fd, _SEALS)
        except PermissionError as error:
            raise DamagedManifest("a chunk was opened read-only or refuses seals") from error
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise PreloadError(
                "this kernel cannot seal memory against future writers (F_SEAL_FUTURE_WRITE): "
                "Linux 5.1 or newer is needed"
            ) from error
        self.verify(fd, nbytes)

    def verify(self, fd: int, nbytes: int) -> None:
        """DamagedManifest unless `fd` is a sealed chunk of exactly `nbytes`."""
        found = _seals(fd)
        if found & _SEALS != _SEALS:
            raise DamagedManifest(
                f"a chunk is not sealed (seals {found:#x}): it could still change"
            )
        nbytes_found = os.fstat(fd).st_size
        if nbytes_found != nbytes or nbytes <= 0:
            raise DamagedManifest(f"a chunk has {nbytes_found} bytes instead of {nbytes}")


class HostMapping:
    """The chunks of one generation, mapped read-only or private. Implements `memory.api.Mapping`.

    `files` are what the kernel calls its chunks (see `private_nbytes`), if it is private.
    """

    def __init__(self, areas: Sequence[mmap.mmap], files: Collection[File] = ()) -> None:
        self._areas = areas
        self._files = frozenset(files)

    @property
    def writable(self) -> bool:
        """False: the seals leave nobody another choice. What is private is no memory of others."""
        return False

    @property
    def private_nbytes(self) -> int:
        """Bytes of pages that were written to and are not swapped out, as the kernel counts them.

        It goes through all memory of this process for that.
        """
        return private_nbytes(self._files) if self._files else 0

    def room(self) -> tuple[int, str]:
        """What MemAvailable and the cgroups leave."""
        return room()

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk, read-only unless this is private."""
        return memoryview(self._areas[index])

    def read(self, index: int, offset: int, nbytes: int) -> bytes:
        """A copy of some bytes of a chunk; ValueError outside of it."""
        area = self._areas[index]
        if offset < 0 or nbytes < 0 or offset + nbytes > len(area):
            raise ValueError(f"no {nbytes} bytes at {offset} in a chunk of {len(area)}")
        return area[offset : offset + nbytes]

    def lend(
        self, index: int, offset: int, nbytes: int, use: Callable[[memoryview], object]
    ) -> None:
        """Show the bytes where they lie. See `memory.api.Mapping`."""
        area = self._areas[index]
        if offset < 0 or not 0 <= nbytes <= PIECE or offset + nbytes > len(area):
            raise ValueError(f"no {nbytes} bytes at {offset} in a chunk of {len(area)}")
        with memoryview(area)[offset : offset + nbytes] as window:
            use(window)

    def close(self) -> None:
        """Unmap all; BufferError, and nothing unmapped, while a view of any chunk lives."""
        used = [index for index, area in enumerate(self._areas) if _has_views(area)]
        if used:
            raise BufferError(f"views of chunk {used[0]} are still alive")
        for area in self._areas:
            area.close()
        self._areas, self._files = (), frozenset()


class HostMapper:
    """Maps granted chunks, read-only or `private`. Implements `memory.api.Mapper`."""

    def __init__(self, *, private: bool = False) -> None:
        self.private = private

    def map(self, chunks: Sequence[tuple[OwnedFd, int]]) -> HostMapping:
        """Map every (descriptor, size); takes and closes the descriptors, whatever comes.

        DamagedManifest if one is no sealed chunk of that size; OutOfDescriptors, OutOfRoom.
        """
        with ExitStack() as taken, ExitStack() as undo:
            for fd, _ in chunks:
                taken.callback(fd.close)
            areas, files = [], []
            for fd, nbytes in chunks:
                area = _map(fd.fileno(), nbytes, private=self.private)
                undo.callback(area.close)
                areas.append(area)
                files.append(_file(fd.fileno()))
            undo.pop_all()
        return HostMapping(areas, files if self.private else ())


def private_nbytes(files: Collection[File]) -> int:
    """Bytes of pages that are this process's own in mappings of these files."""
    total, counts = 0, False
    with Path("/proc/self/smaps").open(errors="replace") as smaps:
        for line in smaps:
            # An area's addresses, flags, offset, device, inode and name; then its counters.
            first, *rest = line.split(maxsplit=5)
            if not first.endswith(":"):
                counts = (rest[2], rest[3]) in files
            elif counts and first == "Anonymous:":
                total += int(rest[0]) * 1024
    return total


def _file(fd: int) -> File:
    found = os.fstat(fd)
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", str(found.st_ino)


def _copy_rows(
    place: memoryview, span: int, rows: Rows, read: Callable[[memoryview], object]
) -> None:
    """Have a span read aside, and its rows copied to where they belong."""
    scratch = memoryview(bytearray(span))
    read(scratch)
    for row in range(rows.count):
        source, start = rows.skip + row * rows.stride, row * rows.nbytes
        place[start : start + rows.nbytes] = scratch[source : source + rows.nbytes]


def _has_views(area: mmap.mmap) -> bool:
    """Whether memoryviews, or what was made of them, still use a mapping."""
    try:
        # Asks without doing: it looks for views first, and then refuses, since a mapping that is
        # read-only or private has the size of its file.
        area.resize(len(area))
    except BufferError:
        return True
    except TypeError:
        return False
    raise AssertionError("a mapping of a sealed chunk was resized")


def _map(fd: int, nbytes: int, *, private: bool) -> mmap.mmap:
    HostKeeper().verify(fd, nbytes)
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
    try:
        with _translated(nbytes):
            # The mapping has a duplicate of the descriptor until it is closed.
            area = mmap.mmap(fd, nbytes, access=access)
    except PermissionError as error:
        raise DamagedManifest("a chunk was opened write-only") from error
    area.madvise(mmap.MADV_DONTDUMP)
    return area


def _seals(fd: int) -> int:
    try:
        return memfd.seals(fd)
    except OSError as error:
        raise DamagedManifest("a chunk came as something else than a memfd") from error


@contextmanager
def _translated(nbytes: int) -> Iterator[None]:
    """Give errors of the kernel about `nbytes` of memory their meaning."""
    try:
        yield
    except OSError as error:
        if is_exhausted(error):
            raise exhausted(error, f"making or mapping a chunk of {nbytes:,} bytes") from error
        if error.errno in {errno.ENOMEM, errno.ENOSPC, errno.EFBIG}:
            raise _out_of_room(error, nbytes) from error
        raise


def _out_of_room(error: OSError, nbytes: int) -> OutOfRoom:
    if error.errno == errno.EFBIG:
        free, limit = (
            resource.getrlimit(resource.RLIMIT_FSIZE)[0],
            "the file size limit (ulimit -f)",
        )
        return OutOfRoom(wanted=nbytes, free=free, limit=limit, part=True)
    free, limit = room()
    if free >= nbytes:
        free, limit = 0, "a limit of the kernel (`ulimit -v`, or vm.overcommit_memory)"
    return OutOfRoom(wanted=nbytes, free=free, limit=limit, part=True)
