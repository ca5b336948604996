"""What only host memory promises; the contract of all backends is in tests/contract."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from preloadd.errors import DamagedManifest, OutOfDescriptors, OutOfRoom
from preloadd.linux import memfd
from preloadd.linux.fds import OwnedFd
from preloadd.linux.room import room
from preloadd.memory.api import Rows
from preloadd.memory.host import (
    MOST_THREADS,
    HostChunk,
    HostFiller,
    HostKeeper,
    HostMapper,
    HostMapping,
)

PAGE = mmap.PAGESIZE
SIZE = 16 * PAGE
CHUNK_NAME = "memfd:preloadd-chunk"


@pytest.fixture
def chunk() -> Iterator[HostChunk]:
    with HostFiller().create(SIZE) as chunk:
        yield chunk


def put(chunk: HostChunk, target: int, data: bytes) -> None:
    def read(window: memoryview) -> None:
        window[:] = data

    chunk.write(target, len(data), Rows(0, len(data)), read)


def sealed(content: bytes = b"weights") -> OwnedFd:
    """The descriptor of a sealed chunk of SIZE bytes that begins with `content`."""
    with HostFiller().create(SIZE) as chunk:
        put(chunk, 0, content)
        fd = chunk.fd.duplicate()
    HostKeeper().seal(fd.fileno(), SIZE)
    return fd


def mapped(count: int) -> HostMapping:
    return HostMapper().map([(sealed(), SIZE) for _ in range(count)])


def flags_of_the_only_chunk() -> set[str]:
    """The kernel's flags of the one mapping of a chunk in this process."""
    pattern = rf"^[0-9a-f]+-[^\n]*{CHUNK_NAME}.*?^VmFlags: ([^\n]*)"
    smaps = Path("/proc/self/smaps").read_text()
    (flags,) = re.findall(pattern, smaps, re.MULTILINE | re.DOTALL)
    return set(flags.split())


@pytest.mark.parametrize("nbytes", [0, -PAGE, 1, PAGE - 1, PAGE + 1])
def test_a_chunk_is_some_pages(nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(PAGE)):
        HostFiller().create(nbytes)


def test_all_pages_are_allocated_at_once(chunk: HostChunk) -> None:
    assert os.fstat(chunk.fd.fileno()).st_blocks * 512 == SIZE


def test_a_writable_mapping_stays_out_of_children_and_core_dumps(chunk: HostChunk) -> None:
    assert {"wr", "sh", "dc", "dd"} <= flags_of_the_only_chunk()


def test_a_granted_mapping_stays_out_of_core_dumps_and_cannot_become_writable() -> None:
    mapping = mapped(1)
    flags = flags_of_the_only_chunk()
    assert {"rd", "sh", "dd"} <= flags
    assert not {"wr", "mw"} & flags
    mapping.close()


def test_a_whole_span_is_read_straight_into_its_place(chunk: HostChunk) -> None:
    def read(window: memoryview) -> None:
        window[:] = b"data"
        assert os.pread(chunk.fd.fileno(), 4, PAGE) == b"data"

    chunk.write(PAGE, 4, Rows(0, 4), read)


def test_a_span_with_more_than_is_wanted_touches_nothing_else(chunk: HostChunk) -> None:
    put(chunk, 0, b"x" * 100)

    def read(window: memoryview) -> None:
        window[:] = bytes(range(20))
        assert os.pread(chunk.fd.fileno(), 100, 0) == b"x" * 100

    chunk.write(50, 20, Rows(skip=1, nbytes=3, count=2, stride=10), read)
    assert os.pread(chunk.fd.fileno(), 100, 0) == b"x" * 50 + b"\1\2\3\13\14\15" + b"x" * 44


def test_filling_is_not_staged_and_has_nothing_to_close() -> None:
    filler = HostFiller()
    assert not filler.staged
    assert 1 <= filler.threads <= MOST_THREADS
    filler.close()


def test_a_window_that_is_kept_hinders_no_close_after_an_error(chunk: HostChunk) -> None:
    kept: list[memoryview] = []

    def read(window: memoryview) -> None:
        kept.append(window[1:3])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with HostFiller().create(SIZE) as other:
            other.write(0, 4, Rows(0, 4), read)
    assert other.fd.closed
    kept.pop().release()
    del other
    gc.collect()


def test_closing_is_all_or_nothing() -> None:
    mapping = mapped(3)
    view = mapping.chunk(1)
    part = view[2:4]
    view.release()
    for _ in range(2):
        with pytest.raises(BufferError, match="chunk 1"):
            mapping.close()
    # Whatever else was made of the mapping in between works.
    for index in range(3):
        with mapping.chunk(index) as other:
            assert bytes(other[:7]) == b"weights"
    assert bytes(part) == b"ig"
    part.release()
    mapping.close()
    mapping.close()


def test_what_other_libraries_make_of_a_view_counts_as_one() -> None:
    mapping = mapped(1)
    recast = memoryview(mapping.chunk(0)).cast("I")
    with pytest.raises(BufferError):
        mapping.close()
    recast.release()
    mapping.close()


def test_a_closed_mapping_has_no_chunks() -> None:
    mapping = mapped(1)
    mapping.close()
    with pytest.raises(IndexError):
        mapping.chunk(0)


def test_a_descriptor_that_cannot_be_read_is_refused() -> None:
    with sealed() as fd:
        blind = OwnedFd(os.open(f"/proc/self/fd/{fd.fileno()}", os.O_WRONLY))
        with pytest.raises(DamagedManifest, match="write-only"):
            HostMapper().map([(blind, SIZE)])
        assert blind.closed


def test_a_descriptor_that_cannot_be_sealed_is_refused(chunk: HostChunk) -> None:
    path = f"/proc/self/fd/{chunk.fd.fileno()}"
    with OwnedFd(os.open(path, os.O_RDONLY)) as read_only:
        with pytest.raises(DamagedManifest, match="read-only"):
            HostKeeper().seal(read_only.fileno(), SIZE)


def test_sealing_what_is_sealed_already_is_fine() -> None:
    with sealed() as fd:
        HostKeeper().seal(fd.fileno(), SIZE)


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def first_free() -> int:
    with OwnedFd(os.open("/dev/null", os.O_RDONLY)) as fd:
        return fd.fileno()


@pytest.mark.parametrize("spare", [0, 1])
def test_too_few_descriptors_to_fill_name_the_limit(spare: int) -> None:
    with limited(resource.RLIMIT_NOFILE, first_free() + spare):
        with pytest.raises(OutOfDescriptors, match="ulimit -n"):
            HostFiller().create(SIZE)


def test_too_few_descriptors_to_map_name_the_limit_and_leave_nothing() -> None:
    chunks = [(sealed(), SIZE) for _ in range(3)]
    with limited(resource.RLIMIT_NOFILE, first_free() + 2):
        with pytest.raises(OutOfDescriptors, match="ulimit -n"):
            HostMapper().map(chunks)
    assert all(fd.closed for fd, _ in chunks)


def test_a_file_size_limit_is_told_with_its_numbers() -> None:
    with limited(resource.RLIMIT_FSIZE, PAGE), pytest.raises(OutOfRoom) as caught:
        HostFiller().create(SIZE)
    assert (caught.value.wanted, caught.value.free) == (SIZE, PAGE)
    assert "ulimit -f" in str(caught.value)


CROWDED = """
import resource, sys
from preloadd.errors import OutOfRoom
from preloadd.memory.host import HostFiller
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), -1))
try:
    HostFiller().create(16 << 20)
except OutOfRoom as error:
    print(error.wanted, error)
"""


def test_a_lack_of_address_space_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True)
    assert done.stdout.startswith(f"{16 << 20} "), done.stderr
    assert "ulimit -v" in done.stdout


def test_the_room_is_that_of_the_host() -> None:
    nbytes, bound = HostFiller().room()
    assert bound == room()[1]
    assert nbytes > 0


LIBC = ctypes.CDLL(None, use_errno=True)
PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def address_of_the_only_chunk() -> int:
    (line,) = [s for s in Path("/proc/self/maps").read_text().splitlines() if CHUNK_NAME in s]
    return int(line.partition("-")[0], 16)


def denied(result: int) -> bool:
    return result == -1 and ctypes.get_errno() in {errno.EPERM, errno.EACCES, errno.EINVAL}


def test_a_mapping_cannot_be_made_writable_or_emptied() -> None:
    mapping = mapped(1)
    address = ctypes.c_void_p(address_of_the_only_chunk())
    assert denied(LIBC.mprotect(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE))
    assert denied(LIBC.madvise(address, SIZE, mmap.MADV_REMOVE))
    # The kernel lets debuggers write to private mappings only.
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(address.value or 0)
        with pytest.raises(OSError, match="Input/output error"):
            memory.write(b"x")
    with mapping.chunk(0) as view:
        assert bytes(view[:7]) == b"weights"
    mapping.close()


def test_holes_cannot_be_punched() -> None:
    with sealed() as fd:
        offset, length = ctypes.c_long(0), ctypes.c_long(PAGE)
        assert denied(LIBC.fallocate(fd.fileno(), PUNCH_HOLE, offset, length))
        assert os.pread(fd.fileno(), 7, 0) == b"weights"


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC])
def test_opening_it_anew_helps_nobody(flags: int) -> None:
    with sealed() as fd:
        with suppress(PermissionError):
            with OwnedFd(os.open(f"/proc/self/fd/{fd.fileno()}", flags)) as again:
                with pytest.raises(PermissionError):
                    os.write(again.fileno(), b"x")
        assert os.pread(fd.fileno(), 7, 0) == b"weights"
        assert os.fstat(fd.fileno()).st_size == SIZE


def test_private_copies_stay_private() -> None:
    with sealed() as fd:
        with mmap.mmap(fd.fileno(), SIZE, flags=mmap.MAP_PRIVATE) as copy:
            copy[:7] = b"changed"
        assert os.pread(fd.fileno(), 7, 0) == b"weights"


# -- private mappings --


def private(*fds: OwnedFd) -> HostMapping:
    return HostMapper(private=True).map([(fd.duplicate(), SIZE) for fd in fds])


def test_what_is_written_to_a_private_mapping_is_seen_there_alone() -> None:
    with sealed() as fd:
        one, other = private(fd), private(fd)
        shared = HostMapper().map([(fd.duplicate(), SIZE)])
        with one.chunk(0) as view:
            assert not view.readonly
            view[:7] = b"changed"
            assert bytes(view[:7]) == one.read(0, 0, 7) == b"changed"
        for mapping in (other, shared):
            assert mapping.read(0, 0, 7) == b"weights"
        assert os.pread(fd.fileno(), 7, 0) == b"weights"
        assert not one.writable
        for mapping in (one, other, shared):
            mapping.close()


def test_pages_that_were_written_to_are_counted() -> None:
    with sealed() as fd, sealed() as second, sealed() as third:
        foreign = private(third)
        mapping = private(fd, second)
        shared = HostMapper().map([(fd.duplicate(), SIZE)])
        assert mapping.read(0, 0, SIZE) == shared.read(0, 0, SIZE)
        assert mapping.private_nbytes == 0
        with mapping.chunk(0) as one, mapping.chunk(1) as two:
            for place in (0, 1, PAGE - 1, 3 * PAGE):
                one[place] = 1
            assert mapping.private_nbytes == 2 * PAGE
            two[SIZE - 1] = two[SIZE - 1]
        assert mapping.private_nbytes == 3 * PAGE
        assert (foreign.private_nbytes, shared.private_nbytes) == (0, 0)
        for each in (foreign, mapping, shared):
            each.close()
        assert mapping.private_nbytes == 0


def test_a_private_mapping_in_use_is_not_closed_and_keeps_what_was_written() -> None:
    with sealed() as fd:
        mapping = private(fd, fd)
    view = mapping.chunk(1)
    view[0] = 7
    with pytest.raises(BufferError, match="chunk 1"):
        mapping.close()
    assert mapping.read(1, 0, 1) == b"\7"
    view.release()
    mapping.close()
    mapping.close()


def test_a_private_mapping_stays_out_of_core_dumps() -> None:
    with sealed() as fd:
        mapping = private(fd)
    flags = flags_of_the_only_chunk()
    assert {"rd", "wr", "dd"} <= flags
    assert "sh" not in flags
    mapping.close()


def test_a_child_has_pages_of_its_own_as_well() -> None:
    with sealed() as fd:
        mapping = private(fd)
    with mapping.chunk(0) as view:
        view[0] = 1
        child = os.fork()
        if child == 0:
            view[0] = 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert view[0] == 1
    mapping.close()


WAYS: dict[str, Callable[[int], object]] = {
    "write": lambda fd: os.write(fd, b"x"),
    "pwrite": lambda fd: os.pwrite(fd, b"x", 0),
    "shrink": lambda fd: os.ftruncate(fd, 0),
    "grow": lambda fd: os.ftruncate(fd, 2 * SIZE),
    "map writable": lambda fd: mmap.mmap(fd, SIZE),
    "more seals": lambda fd: memfd.seal(fd, memfd.SEAL_WRITE),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_sealed_chunk_cannot_be_changed(way: str) -> None:
    with sealed() as fd:
        with pytest.raises(OSError):
            WAYS[way](fd.fileno())
        mapping = HostMapper().map([(fd.duplicate(), SIZE)])
        with mapping.chunk(0) as view:
            assert view.readonly
            with pytest.raises(TypeError):
                view[0] = 0
            assert bytes(view[:7]) == b"weights"
        mapping.close()


def test_a_sealed_chunk_is_verified_by_its_size() -> None:
    with sealed() as fd:
        HostKeeper().verify(fd.fileno(), SIZE)
        for wrong in (SIZE - 1, SIZE + 1, 2 * SIZE, 0, -1):
            with pytest.raises(DamagedManifest, match=str(wrong)):
                HostKeeper().verify(fd.fileno(), wrong)


def test_a_chunk_that_is_larger_than_told_is_not_mapped() -> None:
    good, bad = sealed(), sealed()
    with pytest.raises(DamagedManifest, match=str(SIZE // 2)):
        HostMapper().map([(good, SIZE), (bad, SIZE // 2)])
    assert good.closed
    assert bad.closed


def test_an_unsealed_chunk_is_neither_verified_nor_mapped(chunk: HostChunk) -> None:
    with pytest.raises(DamagedManifest, match="not sealed"):
        HostKeeper().verify(chunk.fd.fileno(), SIZE)
    taken = chunk.fd.duplicate()
    with pytest.raises(DamagedManifest, match="not sealed"):
        HostMapper().map([(taken, SIZE)])
    assert taken.closed


def test_a_chunk_of_another_size_is_not_sealed(chunk: HostChunk) -> None:
    with pytest.raises(DamagedManifest, match=str(2 * SIZE)):
        HostKeeper().seal(chunk.fd.fileno(), 2 * SIZE)


FORKING = """
import os, resource
from preloadd.memory.api import Rows
from preloadd.memory.host import HostFiller
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def read(window):
    window[:] = b"mapped.."
    child = os.fork()
    if child == 0:
        window[0]
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with HostFiller().create(65536) as chunk:
    chunk.write(0, 8, Rows(0, 8), read)
"""


def test_a_child_of_the_filler_has_no_access() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True)
    assert done.stdout.strip() == str(-signal.SIGSEGV), done.stderr


def test_a_lack_of_memory_for_one_chunk_is_not_told_as_one_for_all() -> None:
    with limited(resource.RLIMIT_FSIZE, PAGE), pytest.raises(OutOfRoom, match="need another 8,192"):
        HostFiller().create(2 * PAGE)
