"""The ring of pinned buffers: back-pressure, order, and what happens without memory to pin."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from preloadd.errors import OutOfRoom, PreloadError
from preloadd.memory import pinned
from preloadd.memory.api import Rows
from preloadd.memory.staging import Ring
from preloadd.memory.vmm import Driver
from tests.threads import threads_left
from tests.unit.memory.stand_in import UNIT, StandIn


@pytest.fixture
def device(stand_in: StandIn) -> Iterator[Driver]:
    device = stand_in.open_ordinal(0)
    yield device
    device.close()


@pytest.fixture
def target(device: Driver) -> Iterator[int]:
    """Where one UNIT of memory of the device is, that can be written."""
    with device.current():
        address, handle = device.reserve(UNIT), device.create(UNIT)
        device.map(address, UNIT, handle)
        device.release(handle)
        device.allow(address, UNIT, writable=True)
        yield address
        device.unmap(address, UNIT)
        device.free(address, UNIT)


def numbered(n: int):
    """What fills a buffer with one byte, again and again."""

    def read(window: memoryview) -> None:
        window[:] = bytes([n]) * len(window)

    return read


def test_a_buffer_is_not_filled_again_before_its_copy_has_been_made(
    device: Driver, target: int
) -> None:
    # The stand-in copies when it is waited for: without, each copy would have the last content.
    with Ring(device, count=2, nbytes=16) as ring:
        for n in range(64):
            ring.write(target + 16 * n, 16, Rows(0, 16), numbered(n))
        ring.drain()
        data = device.copy_out(target, 1024)
    assert [data[16 * n] for n in range(64)] == list(range(64))
    assert all(data[n] == data[n - n % 16] for n in range(1024))


def test_a_writer_waits_while_no_buffer_is_free(device: Driver, target: int) -> None:
    going, release = threading.Semaphore(0), threading.Event()

    def slow(window: memoryview) -> None:
        going.release()
        release.wait()

    with Ring(device, count=2, nbytes=16) as ring, ThreadPoolExecutor(3) as pool:
        writes = [pool.submit(ring.write, target, 16, Rows(0, 16), slow) for _ in range(3)]
        for _ in range(2):
            assert going.acquire(timeout=5)
        assert not going.acquire(timeout=0.05)
        release.set()
        for write in writes:
            write.result()


def test_the_buffer_that_has_been_free_longest_is_taken(device: Driver, target: int) -> None:
    taken: list[int] = []
    with Ring(device, count=3, nbytes=16) as ring:
        while len(ring._slots) < 3:
            time.sleep(0.001)
        for n in range(9):
            ring.write(target, 16, Rows(0, 16), lambda w, n=n: (taken.append(w[0]), numbered(n)(w)))
    # What was in a buffer is what was put there three writes before.
    assert taken[3:] == list(range(6))


def test_a_ring_does_with_the_buffers_that_could_be_pinned(
    device: Driver, target: int, stand_in: StandIn
) -> None:
    stand_in.fail_pinning(nth=2)
    with Ring(device, count=3, nbytes=16) as ring:
        for n in range(30):
            ring.write(target + n, 1, Rows(0, 1), numbered(n))
        ring.drain()
        assert device.copy_out(target, 30) == bytes(range(30))


def test_a_ring_without_a_buffer_says_why_to_everybody(
    device: Driver, target: int, stand_in: StandIn
) -> None:
    stand_in.fail_pinning()
    with Ring(device, count=3, nbytes=16) as ring, ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(ring.write, target, 1, Rows(0, 1), pytest.fail) for _ in range(4)]
        for write in writes:
            with pytest.raises(OutOfRoom, match=r"16 bytes but the host's memory .*ulimit -l"):
                write.result(timeout=5)


def test_a_ring_that_fails_as_nobody_thought_says_so_to_everybody(
    device: Driver, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprised(nbytes: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pinned, "allocate", surprised)
    with Ring(device, count=2, nbytes=16) as ring, ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(ring.write, target, 1, Rows(0, 1), pytest.fail) for _ in range(2)]
        for write in writes:
            with pytest.raises(ZeroDivisionError):
                write.result(timeout=5)


def test_an_idle_ring_can_be_closed_at_once(device: Driver, stand_in: StandIn) -> None:
    before = stand_in.alive()
    Ring(device, count=8, nbytes=1 << 20).close()
    assert stand_in.alive() == before


@pytest.mark.parametrize("more", [0, 2])
def test_a_ring_without_threads_says_so_and_leaves_nothing(
    device: Driver, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    allocate = pinned.allocate

    def slow(nbytes: int) -> pinned.Pinned:  # or one thread would do it all
        time.sleep(0.05)
        return allocate(nbytes)

    monkeypatch.setattr(pinned, "allocate", slow)
    before = stand_in.alive()
    told = r"pinning host memory: .*TasksMax="
    with threads_left(more), pytest.raises(PreloadError, match=told):
        Ring(device, count=4, nbytes=16)
    assert stand_in.alive() == before
