"""What every memory backend keeps: bytes belong to whoever holds descriptors.

That nobody can change them afterwards is for host memory alone: tests/unit/memory/test_host.py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from preloadd.errors import DamagedManifest, OutOfDescriptors
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.memory.api import (
    ALIGNED,
    MAX_SPAN,
    PIECE,
    Filler,
    Keeper,
    Mapper,
    Rows,
    WritableChunk,
)

CHUNKS = 3

Left = Callable[[int], AbstractContextManager[None]]


def content(nbytes: int, seed: int) -> bytes:
    """Bytes that differ from page to page and from chunk to chunk."""
    words = (seed << 32 | word for word in range(nbytes // 8))
    return b"".join(word.to_bytes(8, "little") for word in words)


def put(chunk: WritableChunk, target: int, data: bytes) -> None:
    """Write plain bytes, in spans that every backend takes."""
    for start in range(0, len(data), MAX_SPAN):
        part = data[start : start + MAX_SPAN]
        chunk.write(target + start, len(part), Rows(0, len(part)), reader(part))


def reader(data: bytes) -> Callable[[memoryview], object]:
    """What fills a buffer with `data`, and finds it just as large."""

    def read(window: memoryview) -> None:
        assert not window.readonly
        window[:] = data

    return read


def filled(filler: Filler, nbytes: int, seed: int = 1) -> OwnedFd:
    """A chunk that was filled and unmapped, not sealed yet."""
    with filler.create(nbytes) as chunk:
        put(chunk, 0, content(nbytes, seed))
        chunk.finish()
        return chunk.fd.duplicate()


def read_back(chunk: WritableChunk, keeper: Keeper, mapper: Mapper) -> bytes:
    """What an engine would find in a chunk; nothing can be written after."""
    chunk.finish()
    keeper.seal(chunk.fd.fileno(), chunk.nbytes)
    mapping = mapper.map([(chunk.fd.duplicate(), chunk.nbytes)])
    data = mapping.read(0, 0, chunk.nbytes)
    mapping.close()
    return data


@pytest.fixture
def nbytes(filler: Filler) -> int:
    return 4 * filler.granularity


@pytest.fixture
def sealed(filler: Filler, keeper: Keeper, nbytes: int) -> Iterator[OwnedFd]:
    with filled(filler, nbytes) as fd:
        keeper.seal(fd.fileno(), nbytes)
        yield fd


def test_a_new_chunk_is_zero_and_as_large_as_asked(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    with filler.create(nbytes) as chunk:
        assert chunk.nbytes == nbytes
        assert not os.get_inheritable(chunk.fd.fileno())
        assert read_back(chunk, keeper, mapper) == bytes(nbytes)
    assert chunk.fd.closed


def test_chunks_are_multiples_of_the_granularity(filler: Filler) -> None:
    unit = filler.granularity
    for wrong in (0, -unit, unit - 1, unit + 1):
        with pytest.raises(ValueError, match=str(unit)):
            filler.create(wrong)


def test_rows_of_a_span_are_packed_at_their_place(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    span = bytes(range(200))
    with filler.create(nbytes) as chunk:
        chunk.write(7, 200, Rows(skip=10, nbytes=30), reader(span))
        chunk.write(100, 200, Rows(skip=3, nbytes=5, count=4, stride=60), reader(span))
        chunk.write(200, 200, Rows(skip=1, nbytes=50, count=3, stride=50), reader(span))
        chunk.write(nbytes - 200, 200, Rows(skip=0, nbytes=200), reader(span))
        chunk.write(50, 200, Rows(skip=9, nbytes=0), reader(span))
        found = read_back(chunk, keeper, mapper)
    expected = bytearray(nbytes)
    expected[7:37] = span[10:40]
    expected[100:120] = span[3:8] + span[63:68] + span[123:128] + span[183:188]
    expected[200:350] = span[1:151]
    expected[-200:] = span
    assert found == bytes(expected)


def test_many_threads_write_at_once(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    step = nbytes // 64
    data = content(nbytes, 5)
    with filler.create(nbytes) as chunk, ThreadPoolExecutor(8) as pool:
        pieces = [(start, data[start : start + step]) for start in range(0, nbytes, step)]
        list(pool.map(lambda piece: put(chunk, *piece), pieces))
        assert read_back(chunk, keeper, mapper) == data


def test_two_chunks_are_written_at_once(filler: Filler, keeper: Keeper, mapper: Mapper) -> None:
    unit = filler.granularity
    with filler.create(unit) as one, filler.create(2 * unit) as other:
        put(one, 0, content(unit, 1))
        put(other, unit, content(unit, 2))
        assert read_back(one, keeper, mapper) == content(unit, 1)
        assert read_back(other, keeper, mapper) == bytes(unit) + content(unit, 2)


@pytest.mark.parametrize(
    ("target", "span", "rows"),
    [
        (-1, 8, Rows(0, 8)),
        (1, 8, Rows(0, 8)),
        (0, 8, Rows(1, 8)),
        (0, 8, Rows(-1, 4)),
        (0, 8, Rows(0, -1)),
        (0, 8, Rows(0, 2, 0, 4)),
        (0, 8, Rows(0, 2, 3, 4)),
        (0, 8, Rows(0, 4, 2, 3)),
    ],
)
def test_what_does_not_fit_is_not_even_read(
    filler: Filler, nbytes: int, target: int, span: int, rows: Rows
) -> None:
    with filler.create(nbytes) as chunk:
        with pytest.raises(ValueError, match=r"in a (chunk|span) of"):
            chunk.write(nbytes - 8 + target if target >= 0 else target, span, rows, pytest.fail)


def test_a_staged_span_is_bounded_and_aligned(filler: Filler, nbytes: int) -> None:
    if not filler.staged:
        return
    starts = []
    with filler.create(nbytes) as chunk:
        for span in (1, ALIGNED, MAX_SPAN):
            chunk.write(
                0,
                span,
                Rows(span - 1, 1),
                lambda v: starts.append(ctypes.addressof(ctypes.c_char.from_buffer(v))),
            )
        with pytest.raises(ValueError, match=str(MAX_SPAN + 1)):
            chunk.write(0, MAX_SPAN + 1, Rows(0, 1), pytest.fail)
        chunk.finish()
    assert [start % ALIGNED for start in starts] == [0, 0, 0]


def test_what_a_reader_raises_passes_through_and_harms_nothing(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    def fail(window: memoryview) -> None:
        raise ZeroDivisionError

    with filler.create(nbytes) as chunk:
        for _ in range(100):
            with pytest.raises(ZeroDivisionError):
                chunk.write(0, 8, Rows(0, 8), fail)
        put(chunk, 8, b"written.")
        assert read_back(chunk, keeper, mapper)[8:16] == b"written."


def test_a_load_that_failed_leaves_no_chunk(filler: Filler, nbytes: int) -> None:
    with pytest.raises(ZeroDivisionError):
        with filler.create(nbytes) as chunk:
            put(chunk, 0, content(nbytes, 1))
            raise ZeroDivisionError
    assert chunk.fd.closed


def test_there_is_room_and_something_bounds_it(filler: Filler) -> None:
    free, bound = filler.room()
    assert free > 0
    assert bound
    assert filler.threads >= 1


def test_bytes_arrive_in_order_and_read_only(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    chunks = [(filled(filler, nbytes * (n + 1), n), nbytes * (n + 1)) for n in range(CHUNKS)]
    for fd, size in chunks:
        keeper.seal(fd.fileno(), size)
    mapping = mapper.map(chunks)
    assert (mapping.writable, mapping.private_nbytes) == (False, 0)
    free, bound = mapping.room()
    assert free > 0
    assert bound
    for n in range(CHUNKS):
        size, expected = nbytes * (n + 1), content(nbytes * (n + 1), n)
        assert mapping.read(n, 0, size) == expected
        assert mapping.read(n, 1000, 24) == expected[1000:1024]
        assert mapping.read(n, size, 0) == b""
        for offset, count in ((-1, 2), (0, size + 1), (size, 1), (4, -1)):
            with pytest.raises(ValueError, match=f"in a chunk of {size}"):
                mapping.read(n, offset, count)
    mapping.close()
    assert all(fd.closed for fd, _ in chunks)


def test_an_arena_without_chunks_is_no_special_case(mapper: Mapper) -> None:
    mapper.map([]).close()


def test_one_chunk_is_mapped_by_many(sealed: OwnedFd, mapper: Mapper, nbytes: int) -> None:
    mappings = [mapper.map([(sealed.duplicate(), nbytes)]) for _ in range(3)]
    mappings.pop().close()
    for mapping in mappings:
        assert mapping.read(0, 0, nbytes) == content(nbytes, 1)
        mapping.close()


def test_a_mapping_outlives_every_descriptor(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    fd = filled(filler, nbytes)
    keeper.seal(fd.fileno(), nbytes)
    mapping = mapper.map([(fd, nbytes)])
    assert fd.closed
    assert mapping.read(0, 0, nbytes) == content(nbytes, 1)
    mapping.close()


def test_a_mapping_in_use_is_not_closed_and_stays_usable(
    sealed: OwnedFd, mapper: Mapper, nbytes: int
) -> None:
    mapping = mapper.map([(sealed.duplicate(), nbytes), (sealed.duplicate(), nbytes)])
    used = mapping.chunk(1)
    assert used.nbytes == nbytes
    for _ in range(2):
        with pytest.raises(BufferError, match="still"):
            mapping.close()
        assert mapping.read(0, 0, nbytes) == content(nbytes, 1)
        assert mapping.read(1, 0, nbytes) == content(nbytes, 1)
    del used
    gc.collect()
    mapping.close()
    mapping.close()


def test_a_chunk_of_another_size_is_not_mapped(
    sealed: OwnedFd, mapper: Mapper, nbytes: int
) -> None:
    for wrong in (2 * nbytes, 0, -1):
        good, bad = sealed.duplicate(), sealed.duplicate()
        with pytest.raises(DamagedManifest, match=str(wrong)):
            mapper.map([(good, nbytes), (bad, wrong)])
        assert good.closed
        assert bad.closed


@contextmanager
def foreign(kind: str, folder: Path, nbytes: int) -> Iterator[OwnedFd]:
    """A descriptor that some peer might send instead of a chunk."""
    with ExitStack() as stack:
        if kind == "file":
            (folder / "file").write_bytes(bytes(nbytes))
            yield stack.enter_context(OwnedFd(os.open(folder / "file", os.O_RDWR)))
        elif kind == "tmpfs file":
            fd = stack.enter_context(OwnedFd(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)))
            os.ftruncate(fd.fileno(), nbytes)
            yield fd
        elif kind == "socket":
            left, right = map(OwnedFd, (s.detach() for s in socket.socketpair()))
            stack.enter_context(left)
            yield stack.enter_context(right)
        else:
            yield stack.enter_context(OwnedFd(os.open("/dev/zero", os.O_RDWR)))


@pytest.mark.parametrize("kind", ["file", "tmpfs file", "socket", "device"])
def test_what_is_no_chunk_is_refused_everywhere(
    filler: Filler, keeper: Keeper, mapper: Mapper, tmp_path: Path, kind: str
) -> None:
    unit = filler.granularity
    with foreign(kind, tmp_path, unit) as fd:
        with pytest.raises(DamagedManifest):
            keeper.seal(fd.fileno(), unit)
        with pytest.raises(DamagedManifest):
            keeper.verify(fd.fileno(), unit)
        taken = fd.duplicate()
        with pytest.raises(DamagedManifest):
            mapper.map([(taken, unit)])
        assert taken.closed


def test_too_few_descriptors_name_the_limit_and_leave_nothing(
    filler: Filler, nbytes: int, descriptors_left: Left
) -> None:
    with descriptors_left(0), pytest.raises(OutOfDescriptors, match="ulimit -n"):
        filler.create(nbytes)


def test_bytes_are_lent_where_they_are(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    fd = filled(filler, nbytes, seed=5)
    keeper.seal(fd.fileno(), nbytes)
    mapping = mapper.map([(fd, nbytes)])
    whole, seen = content(nbytes, 5), []
    try:
        for offset, count in ((0, nbytes), (5, 100), (nbytes, 0)):
            mapping.lend(0, offset, count, lambda window: seen.append(bytes(window)))
            assert seen.pop() == whole[offset : offset + count]
        with pytest.raises(ZeroDivisionError):
            mapping.lend(0, 0, 8, lambda window: window[0] / 0)
        for offset, count in ((-1, 1), (0, nbytes + 1), (nbytes, 1), (0, -1), (0, PIECE + 1)):
            with pytest.raises(ValueError, match="bytes at"):
                mapping.lend(0, offset, count, seen.append)
    finally:
        mapping.close()
    assert not seen


def test_threads_are_lent_bytes_at_once(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    fd = filled(filler, nbytes, seed=6)
    keeper.seal(fd.fileno(), nbytes)
    mapping = mapper.map([(fd, nbytes)])
    whole = content(nbytes, 6)

    def lent(offset: int) -> bool:
        seen: list[bytes] = []
        mapping.lend(0, offset, 64, lambda window: seen.append(bytes(window)))
        return seen == [whole[offset : offset + 64]]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lent, range(0, nbytes - 64, max(64, nbytes // 64))))
    mapping.close()


FILLING = """
import socket, sys, time
from preloadd.linux import seqpacket
from preloadd.memory.api import Rows
rank = socket.socket(fileno=int(sys.argv[1]))
nbytes = int(sys.argv[2])
with Filler().create(nbytes) as chunk:
    chunk.write(0, nbytes, Rows(0, nbytes), sys.stdin.buffer.readinto)
    chunk.finish()
    seqpacket.send(rank, b"filled", [chunk.fd.fileno()])
    time.sleep(60)  # with the chunk still mapped
"""

READING = """
import sys
from preloadd.linux.fds import OwnedFd
mapping = Mapper().map([(OwnedFd(int(sys.argv[1])), int(sys.argv[2]))])
sys.stdout.buffer.write(mapping.read(0, 0, int(sys.argv[2])))
mapping.close()
"""


def python(imports: str, source: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", f"{imports}\n{source}", *map(str, arguments)]


def filled_by_another_process(imports: str, nbytes: int) -> OwnedFd:
    """A chunk whose filler was killed while it had it mapped."""
    ours, theirs = seqpacket.pair()
    with ours, theirs:
        command = python(imports, FILLING, theirs.fileno(), nbytes)
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]) as child:
            theirs.close()
            assert child.stdin is not None
            child.stdin.write(content(nbytes, 9))
            child.stdin.close()
            (fd,) = seqpacket.receive(ours, 100).fds
            child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    return fd


def test_bytes_survive_their_filler_and_reach_another_process(
    keeper: Keeper, imports: str, nbytes: int
) -> None:
    # From here on, this process holds the descriptor and nothing else holds the memory.
    with filled_by_another_process(imports, nbytes) as fd:
        keeper.seal(fd.fileno(), nbytes)
        command = python(imports, READING, fd.fileno(), nbytes)
        done = subprocess.run(command, pass_fds=[fd.fileno()], capture_output=True)
        assert done.stdout == content(nbytes, 9), done.stderr
