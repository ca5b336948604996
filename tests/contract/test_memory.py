"""What every memory backend keeps: bytes belong to whoever holds descriptors, and cannot change."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from preloadd.errors import DamagedManifest
from preloadd.linux import memfd, seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.memory.api import Filler, Keeper, Mapper

CHUNKS = 3


def content(nbytes: int, seed: int) -> bytes:
    """Bytes that differ from page to page and from chunk to chunk."""
    words = (seed << 32 | word for word in range(nbytes // 8))
    return b"".join(word.to_bytes(8, "little") for word in words)


def filled(filler: Filler, nbytes: int, seed: int = 1) -> OwnedFd:
    """A chunk that was filled and unmapped, not sealed yet."""
    with filler.create(nbytes) as chunk:
        with chunk.view(0, nbytes) as window:
            window[:] = content(nbytes, seed)
        return chunk.fd.duplicate()


@pytest.fixture
def nbytes(filler: Filler) -> int:
    return 4 * filler.granularity


@pytest.fixture
def sealed(filler: Filler, keeper: Keeper, nbytes: int) -> Iterator[OwnedFd]:
    with filled(filler, nbytes) as fd:
        keeper.seal(fd.fileno(), nbytes)
        yield fd


def test_a_new_chunk_is_zero_and_as_large_as_asked(filler: Filler, nbytes: int) -> None:
    with filler.create(nbytes) as chunk:
        assert chunk.nbytes == nbytes
        assert not os.get_inheritable(chunk.fd.fileno())
        with chunk.view(0, nbytes) as window:
            assert not window.readonly
            assert bytes(window) == bytes(nbytes)


def test_windows_show_the_same_bytes(filler: Filler, nbytes: int) -> None:
    with filler.create(nbytes) as chunk:
        with chunk.view(512, 100) as window, chunk.view(0, nbytes) as whole:
            window[:4] = b"data"
            assert len(window) == 100
            assert bytes(whole[510:518]) == b"\0\0data\0\0"


def test_there_is_room_and_something_bounds_it(filler: Filler) -> None:
    free, bound = filler.room()
    assert free > 0
    assert bound


def test_bytes_arrive_in_order_and_read_only(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    chunks = [(filled(filler, nbytes * (n + 1), n), nbytes * (n + 1)) for n in range(CHUNKS)]
    for fd, size in chunks:
        keeper.seal(fd.fileno(), size)
    mapping = mapper.map(chunks)
    assert not mapping.writable
    for n in range(CHUNKS):
        with mapping.chunk(n) as view:
            assert view.readonly
            assert bytes(view) == content(nbytes * (n + 1), n)
    mapping.close()
    assert all(fd.closed for fd, _ in chunks)


def test_an_arena_without_chunks_is_no_special_case(mapper: Mapper) -> None:
    mapper.map([]).close()


def test_one_chunk_is_mapped_by_many(sealed: OwnedFd, mapper: Mapper, nbytes: int) -> None:
    mappings = [mapper.map([(sealed.duplicate(), nbytes)]) for _ in range(3)]
    mappings.pop().close()
    for mapping in mappings:
        with mapping.chunk(0) as view:
            assert bytes(view) == content(nbytes, 1)
        mapping.close()


def test_a_mapping_outlives_every_descriptor(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    fd = filled(filler, nbytes)
    keeper.seal(fd.fileno(), nbytes)
    mapping = mapper.map([(fd, nbytes)])
    assert fd.closed
    with mapping.chunk(0) as view:
        assert bytes(view) == content(nbytes, 1)
    mapping.close()


def test_a_mapping_in_use_is_not_closed_and_stays_usable(
    sealed: OwnedFd, mapper: Mapper, nbytes: int
) -> None:
    mapping = mapper.map([(sealed.duplicate(), nbytes), (sealed.duplicate(), nbytes)])
    with mapping.chunk(1) as view:
        with pytest.raises(BufferError):
            mapping.close()
        assert bytes(view) == content(nbytes, 1)
        with mapping.chunk(0) as other:
            assert bytes(other) == content(nbytes, 1)
    mapping.close()


WAYS: dict[str, Callable[[int, int], object]] = {
    "write": lambda fd, _: os.write(fd, b"x"),
    "pwrite": lambda fd, _: os.pwrite(fd, b"x", 0),
    "shrink": lambda fd, _: os.ftruncate(fd, 0),
    "grow": lambda fd, nbytes: os.ftruncate(fd, 2 * nbytes),
    "map writable": mmap.mmap,
    "more seals": lambda fd, _: memfd.seal(fd, memfd.SEAL_WRITE),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_sealed_chunk_cannot_be_changed(
    sealed: OwnedFd, mapper: Mapper, nbytes: int, way: str
) -> None:
    with pytest.raises(OSError):
        WAYS[way](sealed.fileno(), nbytes)
    mapping = mapper.map([(sealed.duplicate(), nbytes)])
    with mapping.chunk(0) as view:
        with pytest.raises(TypeError):
            view[0] = 0
        assert bytes(view) == content(nbytes, 1)
    mapping.close()


def test_a_sealed_chunk_is_verified_by_its_size(
    sealed: OwnedFd, keeper: Keeper, nbytes: int
) -> None:
    keeper.verify(sealed.fileno(), nbytes)
    for wrong in (nbytes - 1, nbytes + 1, 2 * nbytes, 0, -1):
        with pytest.raises(DamagedManifest, match=str(wrong)):
            keeper.verify(sealed.fileno(), wrong)


def test_a_chunk_of_another_size_is_not_mapped(
    sealed: OwnedFd, mapper: Mapper, nbytes: int
) -> None:
    for wrong in (nbytes // 2, 2 * nbytes, 0):
        good, bad = sealed.duplicate(), sealed.duplicate()
        with pytest.raises(DamagedManifest, match=str(wrong)):
            mapper.map([(good, nbytes), (bad, wrong)])
        assert good.closed
        assert bad.closed


def test_an_unsealed_chunk_is_neither_verified_nor_mapped(
    filler: Filler, keeper: Keeper, mapper: Mapper, nbytes: int
) -> None:
    with filled(filler, nbytes) as fd:
        with pytest.raises(DamagedManifest, match="not sealed"):
            keeper.verify(fd.fileno(), nbytes)
        taken = fd.duplicate()
        with pytest.raises(DamagedManifest, match="not sealed"):
            mapper.map([(taken, nbytes)])
        assert taken.closed


def test_a_chunk_of_another_size_is_not_sealed(filler: Filler, keeper: Keeper, nbytes: int) -> None:
    with filled(filler, nbytes) as fd, pytest.raises(DamagedManifest, match=str(2 * nbytes)):
        keeper.seal(fd.fileno(), 2 * nbytes)


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
    keeper: Keeper, mapper: Mapper, tmp_path: Path, kind: str
) -> None:
    with foreign(kind, tmp_path, 4096) as fd:
        with pytest.raises(DamagedManifest):
            keeper.seal(fd.fileno(), 4096)
        with pytest.raises(DamagedManifest):
            keeper.verify(fd.fileno(), 4096)
        taken = fd.duplicate()
        with pytest.raises(DamagedManifest):
            mapper.map([(taken, 4096)])
        assert taken.closed


FILLING = """
import socket, sys, time
from preloadd.linux import seqpacket
rank = socket.socket(fileno=int(sys.argv[1]))
nbytes = int(sys.argv[2])
with Filler().create(nbytes) as chunk:
    with chunk.view(0, nbytes) as window:
        window[:] = sys.stdin.buffer.read()
        seqpacket.send(rank, b"filled", [chunk.fd.fileno()])
        time.sleep(60)  # with the chunk still mapped and the window open
"""

READING = """
import sys
from preloadd.linux.fds import OwnedFd
mapping = Mapper().map([(OwnedFd(int(sys.argv[1])), int(sys.argv[2]))])
with mapping.chunk(0) as view:
    sys.stdout.buffer.write(view)
mapping.close()
"""

FORKING = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with Filler().create(int(sys.argv[1])) as chunk, chunk.view(0, 8) as window:
    window[:] = b"mapped.."
    child = os.fork()
    if child == 0:
        window[0]
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
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


def test_a_child_of_the_filler_has_no_access(imports: str, nbytes: int) -> None:
    command = python(imports, FORKING, nbytes)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == str(-signal.SIGSEGV), done.stderr
