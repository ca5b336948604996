"""On host memory, and on a GPU's that a library stands in for."""

import gc
import subprocess
import sys
import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from preloadd.domain.ids import device_id
from preloadd.engine.arenas import Arenas, Identity, Share
from preloadd.errors import DamagedManifest, DeviceFailed
from preloadd.linux.fds import OwnedFd
from preloadd.memory.api import Filler, Mapper, Rows
from preloadd.memory.hip.driver import open_ordinal
from preloadd.memory.host import HostFiller, HostKeeper, HostMapper
from preloadd.memory.vmm import VmmFiller, VmmMapper
from tests.driver_stand_in import build

NBYTES = 2 << 20


@dataclass
class Memory:
    """Two chunks of one backend, and what maps them. `name` is how the kernel shows mappings."""

    filler: Filler
    mapper: Mapper
    identity: Identity
    name: str
    fds: list[OwnedFd]

    def granted(self) -> list[OwnedFd]:
        """Fresh descriptors of the chunks, as a daemon grants them."""
        return [fd.duplicate() for fd in self.fds]

    @property
    def mapped(self) -> int:
        """How many chunks this process has mapped, without those that the next `map` unmaps."""
        self.mapper.map([])
        return Path("/proc/self/maps").read_text().count(f"/memfd:{self.name}")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return build.hip(tmp_path_factory.mktemp("hip"))


@pytest.fixture(params=["host", "device"])
def memory(request, library, monkeypatch):
    if request.param == "host":
        filler, mapper, name = HostFiller(), HostMapper(), "preloadd-chunk"
    else:
        monkeypatch.setenv("STAND_IN_DEVICES", "GPU-0123456789abcdef")
        filler = VmmFiller(open_ordinal(0, library), threads=1)
        mapper, name = VmmMapper(open_ordinal(0, library)), "stand-in"
    identity = Identity(request.param, device_id("CPU-0"), "a" * 32, (NBYTES, NBYTES))
    with ExitStack() as kept:
        kept.callback(filler.close)
        fds = [kept.enter_context(filled(filler, value)) for value in (b"A", b"B")]
        if request.param == "host":
            for fd in fds:
                HostKeeper().seal(fd.fileno(), NBYTES)
        yield Memory(filler, mapper, identity, name, fds)


def filled(filler: Filler, value: bytes) -> OwnedFd:
    with filler.create(NBYTES) as chunk:
        chunk.write(0, NBYTES, Rows(0, NBYTES), lambda buffer: fill(buffer, value))
        chunk.finish()
        return chunk.fd.duplicate()


def fill(buffer, value):
    buffer[:] = value * len(buffer)


@pytest.fixture
def arenas(memory):
    """A registry of its own. Tests leave nothing mapped."""
    made = Arenas()
    yield made
    assert len(made) == 0
    gc.collect()
    assert memory.mapped == 0


@pytest.fixture
def share(arenas, memory):
    """Shares the arena of the memory's identity, or of one that differs from it."""

    def share(**changes) -> Share:
        return arenas.share(replace(memory.identity, **changes), memory.granted(), memory.mapper)

    return share


def test_a_generation_is_mapped_once_however_often_it_is_shared(share, memory):
    one, other = share(), share()
    assert memory.mapped == 2
    assert (one.writable, other.read(0, 0, 2), one.read(1, 5, 2)) == (False, b"AA", b"BB")
    one.close()
    assert (memory.mapped, other.read(0, 0, 1)) == (2, b"A")
    other.close()
    assert memory.mapped == 0


@pytest.mark.parametrize(
    "change",
    [{"generation": "b" * 32}, {"device": "CPU-1"}, {"backend": "other"}, {"private": True}],
)
def test_what_is_another_arena_is_mapped_by_itself(share, arenas, memory, change):
    one, other = share(), share(**change)
    assert (len(arenas), memory.mapped) == (1 if "private" in change else 2, 4)
    one.close()
    other.close()


def test_what_is_written_to_a_private_arena_reaches_no_share_of_the_same_generation(memory, arenas):
    if memory.name != "preloadd-chunk":
        assert not memory.mapper.private
        return
    ours = replace(memory.identity, private=True)
    mapper = HostMapper(private=True)
    shared = arenas.share(memory.identity, memory.granted(), memory.mapper)
    one, other = (arenas.share(ours, memory.granted(), mapper) for _ in range(2))
    with one.chunk(0) as view:
        view[0] = ord("Z")
    assert (one.read(0, 0, 2), other.read(0, 0, 2), shared.read(0, 0, 2)) == (b"ZA", b"AA", b"AA")
    # Counted by the memory's file, whichever of its private mappings it was.
    assert one.private_nbytes == other.private_nbytes > 0
    assert shared.private_nbytes == 0
    for share in (shared, one, other):
        share.close()


def test_the_last_to_close_cannot_while_views_live_and_then_can(share, arenas):
    one = share()
    view = one.chunk(0)
    for _ in range(2):
        with pytest.raises(BufferError):
            one.close()
        assert (len(arenas), one.read(0, 0, 1), view.nbytes) == (1, b"A", NBYTES)
    del view
    one.close()
    with pytest.raises(ValueError, match="these weights were closed"):
        one.chunk(0)


def test_closing_twice_counts_once(share):
    one, other = share(), share()
    one.close()
    one.close()
    assert other.read(0, 0, 1) == b"A"
    other.close()


def test_an_abandoned_arena_lasts_as_long_as_its_views(share, arenas, memory):
    one = share()
    view = one.chunk(0)
    one.abandon()
    assert (len(arenas), one.read(1, 0, 1)) == (0, b"B")
    del one
    assert memory.mapped > 0
    del view
    assert memory.mapped == 0


def test_others_keep_what_one_abandons(share):
    one, other = share(), share()
    one.abandon()
    one.close()
    assert other.read(0, 0, 1) == b"A"
    other.close()


def test_what_cannot_be_unmapped_is_told_of_once_and_shared_no_more(arenas, memory, monkeypatch):
    """As of a GPU that is lost: half of it may be unmapped."""

    class Lost:
        def map(self, chunks):
            mapping = memory.mapper.map(chunks)
            unmap = mapping.close

            def close():
                unmap()
                raise DeviceFailed("the GPU is lost")

            monkeypatch.setattr(mapping, "close", close)
            return mapping

    one = arenas.share(memory.identity, memory.granted(), Lost())
    with pytest.raises(DeviceFailed, match="the GPU is lost") as kept:
        one.close()
    assert (len(arenas), kept.type) == (0, DeviceFailed)
    with pytest.raises(ValueError, match="these weights were closed"):
        one.read(0, 0, 1)
    one.close()
    other = arenas.share(memory.identity, memory.granted(), memory.mapper)
    assert other.read(1, 0, 1) == b"B"
    other.close()


def test_a_share_that_was_dropped_counts_no_more(share, arenas, memory):
    one, other = share(), share()
    del other
    view = one.chunk(0)
    with pytest.raises(BufferError):
        one.close()
    del view
    one.close()
    assert (len(arenas), memory.mapped) == (0, 0)
    one = share()
    del one
    assert (len(arenas), memory.mapped) == (0, 0)


def test_what_cannot_be_mapped_is_not_kept(arenas, memory):
    granted = memory.granted()
    granted[1].close()
    granted[1] = OwnedFd.copy_of(0)
    with pytest.raises(DamagedManifest):
        arenas.share(memory.identity, granted, memory.mapper)
    assert all(fd.closed for fd in granted)


def test_descriptors_are_closed_whether_they_are_needed_or_not(arenas, memory):
    first, second = memory.granted(), memory.granted()
    shares = [arenas.share(memory.identity, fds, memory.mapper) for fds in (first, second)]
    assert all(fd.closed for fd in (*first, *second))
    for share in shares:
        share.close()


def test_who_comes_while_it_is_being_mapped_waits_for_that(arenas, memory):
    class Slow:
        """A mapper that can be waited for, and counts."""

        maps = 0
        begun, goes_on = threading.Event(), threading.Event()

        def map(self, chunks):
            self.maps += 1
            self.begun.set()
            assert self.goes_on.wait(10)
            return memory.mapper.map(chunks)

    slow, shares = Slow(), []

    def attach():
        shares.append(arenas.share(memory.identity, memory.granted(), slow))

    threads = [threading.Thread(target=attach) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert slow.begun.wait(10)
    slow.goes_on.set()
    for thread in threads:
        thread.join()
    assert (slow.maps, len(shares)) == (1, 4)
    for share in shares:
        share.close()


class Holder:
    """What a finalizer is of."""


def test_a_finalizer_may_let_go_while_another_arena_is_being_mapped(share, arenas, memory):
    """The garbage collector runs finalizers wherever it likes, so also in the midst of mapping."""
    holders = [Holder()]
    weakref.finalize(holders[0], share().abandon)

    class Collecting:
        def map(self, chunks):
            holders.clear()
            return memory.mapper.map(chunks)

    identity = replace(memory.identity, generation="b" * 32)
    other = arenas.share(identity, memory.granted(), Collecting())
    assert (len(arenas), memory.mapped) == (1, 2)
    other.close()


@pytest.mark.slow
def test_who_is_forked_while_another_thread_attaches_can_attach():
    script = Path(__file__).with_name("forking_stand_in.py")
    argv = [sys.executable, "-W", "ignore::DeprecationWarning", script]
    subprocess.run(argv, check=True, timeout=60)
