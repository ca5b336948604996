"""What memory of GPUs adds to the contract: lifetimes, undoing, devices that fail."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from preloadd.errors import (
    DamagedManifest,
    DeviceFailed,
    OutOfDescriptors,
    OutOfRoom,
    PreloadError,
)
from preloadd.linux.fds import OwnedFd
from preloadd.memory.api import MAX_SPAN, Rows
from preloadd.memory.cuda.driver import CudaDriver
from preloadd.memory.vmm import Driver, VmmFiller, VmmMapper, VmmMapping
from tests.descriptors import open_descriptors
from tests.driver_stand_in import build
from tests.threads import threads_left
from tests.unit.memory.stand_in import CUDA_DEVICES, UNIT, StandIn

LOST = 700  # illegal address: ends the context
BROKEN = 205
ENDED = 4  # the driver, as it does before the process
UNKNOWN = 999
UNNAMED = 12345  # nobody has words for it
NAMES = {"cu": "NVIDIA Stand-In", "hip": "AMD Stand-In"}


@pytest.fixture
def filler(stand_in: StandIn) -> Iterator[VmmFiller]:
    filler = VmmFiller(stand_in.open_ordinal(0), threads=2, longest=4 * UNIT)
    while len(filler._ring._slots) < 3:  # so that nothing but the test makes things of the driver
        time.sleep(0.001)
    yield filler
    filler.close()


@pytest.fixture
def mapper(stand_in: StandIn) -> Iterator[VmmMapper]:
    driver = stand_in.open_ordinal(0)
    yield VmmMapper(driver)
    driver.close()


def filled(filler: VmmFiller, text: bytes, nbytes: int = 2 * UNIT) -> OwnedFd:
    with filler.create(nbytes) as chunk:
        chunk.write(0, len(text), Rows(0, len(text)), lambda window: put(window, text))
        chunk.finish()
        return chunk.fd.duplicate()


def put(window: memoryview, text: bytes) -> None:
    window[:] = text


def mapped(filler: VmmFiller, mapper: VmmMapper, *texts: bytes) -> VmmMapping:
    return mapper.map([(filled(filler, text), 2 * UNIT) for text in texts])


def test_chunks_lie_one_after_the_other(filler: VmmFiller, mapper: VmmMapper) -> None:
    mapping = mapped(filler, mapper, b"one", b"two", b"six")
    buffers = [mapping.chunk(index) for index in range(3)]
    first = buffers[0].address
    assert [b.address - first for b in buffers] == [0, 2 * UNIT, 4 * UNIT]
    assert [b.nbytes for b in buffers] == [2 * UNIT] * 3
    del buffers
    mapping.close()


def test_a_buffer_is_told_as_bytes(filler: VmmFiller, mapper: VmmMapper) -> None:
    mapping = mapped(filler, mapper, b"one")
    buffer = mapping.chunk(0)
    assert buffer.__cuda_array_interface__ == {
        "shape": (2 * UNIT,),
        "typestr": "|u1",
        "data": (buffer.address, False),
        "version": 3,
    }
    del buffer
    mapping.close()


def test_nobody_can_write_through_a_mapping(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn
) -> None:
    mapping = mapped(filler, mapper, b"one")
    address = mapping.chunk(0).address
    driver = stand_in.open_ordinal(0)
    with driver.current():
        with pytest.raises(DeviceFailed, match="ILLEGAL_ADDRESS"):
            driver.clear(address, UNIT)
    driver.close()
    assert mapping.read(0, 0, 3) == b"one"
    mapping.close()


def test_a_mapping_that_is_dropped_lasts_as_long_as_its_buffers(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn
) -> None:
    before = stand_in.alive()
    mapping = mapped(filler, mapper, b"one", b"two")
    buffers = [mapping.chunk(1), mapping.chunk(1)]
    del mapping
    gc.collect()
    assert stand_in.alive() == before + 3  # a range and two mappings
    buffers.pop()
    mapper.map([])
    assert stand_in.alive() == before + 3
    buffers.pop()
    mapper.map([])
    assert stand_in.alive() == before


def test_a_mapping_that_is_dropped_is_unmapped_by_the_next_close(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn
) -> None:
    other = mapped(filler, mapper, b"one")
    before = stand_in.alive()
    mapped(filler, mapper, b"two")
    gc.collect()
    assert stand_in.alive() == before + 2
    other.close()
    assert stand_in.alive() == before - 2


def test_a_collection_calls_nothing_of_the_device(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn
) -> None:
    mapping = mapped(filler, mapper, b"one")
    before = stand_in.alive()
    # To wait for the device would break what another thread captures, whatever it answers.
    stand_in.fail("CtxSynchronize" if stand_in.prefix == "cu" else "DeviceSynchronize", LOST)
    del mapping
    gc.collect()
    assert filler.room()
    stand_in.fail("", 0)
    mapper.map([])
    assert stand_in.alive() == before - 2


def test_a_mapping_that_is_dropped_on_a_lost_device_ends_in_the_log(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    filler = VmmFiller(stand_in.open_ordinal(0), threads=1, longest=UNIT)
    mapper = VmmMapper(stand_in.open_ordinal(0))
    mapping = mapped(filler, mapper, b"one")
    filler.close()
    stand_in.fail("MemUnmap", BROKEN)
    del mapping
    gc.collect()
    mapper.map([])
    assert "unmapping a chunk failed" in caplog.text
    stand_in.end()
    caplog.clear()


def test_a_closed_mapping_has_no_chunks(filler: VmmFiller, mapper: VmmMapper) -> None:
    mapping = mapped(filler, mapper, b"one")
    mapping.close()
    with pytest.raises(IndexError):
        mapping.chunk(0)
    with pytest.raises(IndexError):
        mapping.read(0, 0, 1)


CREATING = ["MemCreate", "MemExportToShareableHandle", "MemAddressReserve", "MemMap"]
CREATING += ["MemSetAccess", "MemsetD32Async"]


CODES = [BROKEN, ENDED, UNKNOWN, UNNAMED]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("function", CREATING)
def test_whatever_fails_in_creating_leaves_nothing(
    filler: VmmFiller, stand_in: StandIn, function: str, code: int
) -> None:
    before = stand_in.alive()
    fds = open_descriptors()
    stand_in.fail(function, code, 1)
    with pytest.raises(DeviceFailed, match=f"STATUS|{UNNAMED}") as caught:
        filler.create(UNIT)
    assert stand_in.devices[0] in str(caught.value)
    assert stand_in.alive() == before
    assert open_descriptors() == fds


@pytest.mark.parametrize("code", [BROKEN, UNNAMED])
def test_a_new_chunk_whose_handle_is_not_given_up_is_undone(
    filler: VmmFiller, stand_in: StandIn, code: int
) -> None:
    before = stand_in.alive()
    fds = open_descriptors()
    stand_in.fail("MemRelease", code, 1)
    with pytest.raises(DeviceFailed, match="releasing a chunk"):
        filler.create(UNIT)
    assert stand_in.alive() == before
    assert open_descriptors() == fds


@pytest.mark.parametrize("code", [BROKEN, UNNAMED])
def test_a_mapping_of_which_a_handle_is_not_given_up_is_undone(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn, code: int
) -> None:
    chunks = [(filled(filler, b"one"), 2 * UNIT) for _ in range(2)]
    before = stand_in.alive()
    stand_in.fail("MemRelease", code, 2)
    with pytest.raises(DeviceFailed, match="releasing a chunk"):
        mapper.map(chunks)
    assert stand_in.alive() == before


MAPPING = ["MemAddressReserve", "MemImportFromShareableHandle", "MemMap", "MemSetAccess"]


@pytest.mark.parametrize("code", [BROKEN, ENDED, UNNAMED])
@pytest.mark.parametrize("function", MAPPING)
@pytest.mark.parametrize("nth", [1, 2])
def test_whatever_fails_in_mapping_leaves_nothing(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn, function: str, nth: int, code: int
) -> None:
    chunks = [(filled(filler, b"one"), 2 * UNIT) for _ in range(2)]
    before = stand_in.alive()
    many = function in {"MemImportFromShareableHandle", "MemMap"}
    stand_in.fail(function, code, nth if many else 1)
    with pytest.raises(DeviceFailed):
        mapper.map(chunks)
    assert stand_in.alive() == before
    assert all(fd.closed for fd, _ in chunks)


@pytest.mark.parametrize("function", ["MemImportFromShareableHandle", "MemMap"])
def test_what_the_driver_does_not_know_of_a_peer_is_damage(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn, function: str
) -> None:
    fd = filled(filler, b"one")
    before = stand_in.alive()
    stand_in.fail(function, UNKNOWN)
    with pytest.raises(DamagedManifest, match="no chunk of this GPU"):
        mapper.map([(fd, 2 * UNIT)])
    assert stand_in.alive() == before


@pytest.mark.parametrize("visible", ["0,1", "1"])
def test_a_chunk_of_another_gpu_is_refused(cuda: StandIn, visible: str) -> None:
    cuda.setenv("STAND_IN_DEVICES", ",".join(cuda.devices))
    theirs = VmmFiller(cuda.open_ordinal(0), threads=1, longest=UNIT)
    fd = filled(theirs, b"one")
    theirs.close()
    cuda.setenv("CUDA_VISIBLE_DEVICES", visible)
    driver = cuda.open_ordinal(visible.split(",").index("1"))
    before = cuda.alive()
    with pytest.raises(DamagedManifest, match=f"another GPU than {cuda.devices[1]} "):
        VmmMapper(driver).map([(fd, 2 * UNIT)])
    assert (cuda.alive(), fd.closed) == (before, True)
    driver.close()


def test_a_chunk_is_at_home_whatever_the_number_of_its_gpu(cuda: StandIn) -> None:
    cuda.setenv("STAND_IN_DEVICES", ",".join(cuda.devices))
    theirs = VmmFiller(cuda.open_ordinal(2), threads=1, longest=UNIT)
    fd = filled(theirs, b"one")
    theirs.close()
    cuda.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    driver = cuda.open_ordinal(1)
    mapping = VmmMapper(driver).map([(fd, 2 * UNIT)])
    assert mapping.read(0, 0, 3) == b"one"
    mapping.close()
    driver.close()


def given_up(driver: Driver) -> dict[str, Callable[[], None]]:
    """What gives something up, by the call that it makes; to be used in the driver's context."""
    handle, address, memory = driver.create(UNIT), driver.reserve(UNIT), driver.pin(UNIT)
    driver.map(address, UNIT, handle)
    unpin = "MemHostUnregister" if isinstance(driver, CudaDriver) else "HostUnregister"
    wait = "CtxSynchronize" if isinstance(driver, CudaDriver) else "DeviceSynchronize"
    queue = driver.open_queue()
    return {
        "StreamDestroy": lambda: driver.close_queue(queue),
        unpin: lambda: driver.unpin(memory),
        wait: driver.synchronize,
        "MemRelease": lambda: driver.release(handle),
        "MemUnmap": lambda: driver.unmap(address, UNIT),
        "MemAddressFree": lambda: driver.free(address, UNIT),
    }


def test_what_cannot_be_given_up_since_the_driver_has_ended_is_no_failure(
    stand_in: StandIn,
) -> None:
    driver = stand_in.open_ordinal(0)
    with driver.current():
        for function, call in given_up(driver).items():
            stand_in.fail(function, ENDED)
            call()
            stand_in.fail(function, BROKEN)
            with pytest.raises(DeviceFailed, match="STATUS"):
                call()
        stand_in.fail("", 0)
    stand_in.fail("DevicePrimaryCtxRelease", ENDED)
    driver.close()
    stand_in.end()


def test_a_mapping_is_closed_although_the_driver_has_ended(
    filler: VmmFiller, stand_in: StandIn
) -> None:
    mapping = mapped(filler, VmmMapper(stand_in.open_ordinal(0)), b"one")
    calls = ["CtxPushCurrent", "SetDevice", "CtxSynchronize", "DeviceSynchronize", "MemUnmap"]
    rules = [f"{stand_in.prefix}{name}:{ENDED}" for name in [*calls, "MemAddressFree"]]
    stand_in.setenv("STAND_IN_FAIL", ",".join(rules))
    mapping.close()
    stand_in.fail("", 0)
    filler.close()
    stand_in.end()


def test_what_the_frames_of_an_error_keep_of_a_buffer_hides_nothing(stand_in: StandIn) -> None:
    def fail(window: memoryview) -> None:
        kept = window[:4]
        raise ZeroDivisionError(kept.nbytes)

    filler = VmmFiller(stand_in.open_ordinal(0), threads=1, longest=UNIT)
    with pytest.raises(ZeroDivisionError), closing(filler), filler.create(UNIT) as chunk:
        chunk.write(0, 8, Rows(0, 8), fail)


@pytest.mark.parametrize("wrong", [UNIT + 1, 3 * UNIT, 1 << 60])
def test_a_size_that_cannot_be_is_damage(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn, wrong: int
) -> None:
    fd = filled(filler, b"one")
    before = stand_in.alive()
    with pytest.raises((DamagedManifest, OutOfRoom)):
        mapper.map([(fd, wrong)])
    assert stand_in.alive() == before
    assert fd.closed


def test_too_little_memory_is_told_with_numbers_and_device(
    filler: VmmFiller, stand_in: StandIn
) -> None:
    stand_in.setenv("STAND_IN_MEMORY", str(3 * UNIT))
    with filler.create(2 * UNIT):
        with pytest.raises(OutOfRoom) as caught:
            filler.create(2 * UNIT)
        assert (caught.value.wanted, caught.value.free) == (2 * UNIT, UNIT)
        assert stand_in.devices[0] in str(caught.value)
        assert filler.room()[0] == UNIT
    assert filler.room()[0] == 3 * UNIT


@pytest.mark.parametrize(
    ("function", "doing"),
    [
        ("MemAddressReserve", "reserving"),
        ("MemImportFromShareableHandle", "importing a chunk"),
        ("MemMap", "mapping a chunk"),
        ("MemSetAccess", "setting access"),
    ],
)
def test_a_device_without_room_to_map_is_told_with_what_to_give_up(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn, function: str, doing: str
) -> None:
    fd = filled(filler, b"one")
    before = stand_in.alive()
    stand_in.fail(function, 2)
    with pytest.raises(OutOfRoom) as caught:
        mapper.map([(fd, 2 * UNIT)])
    told = str(caught.value)
    assert told.startswith(f"{doing} ")
    assert f"OUT_OF_MEMORY (as the stand-in was told): {stand_in.devices[0]}" in told
    assert "gpu_memory_utilization" in told
    assert "missing" not in told
    assert stand_in.alive() == before


def test_a_mapping_says_what_is_free_beside_it(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn
) -> None:
    mapping = mapped(filler, mapper, b"one")
    assert mapping.room() == filler.room()
    mapping.close()


def test_no_descriptor_left_to_map(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn, descriptors_left
) -> None:
    fd = filled(filler, b"one")
    with descriptors_left(0), pytest.raises(OutOfDescriptors, match="ulimit -n"):
        mapper.map([(fd, 2 * UNIT)])
    assert fd.closed


def test_a_device_lost_while_loading_is_told_as_it_began(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    filler = VmmFiller(stand_in.open_ordinal(0), threads=2, longest=UNIT)
    stand_in.fail("MemcpyHtoDAsync", LOST, 5)
    with pytest.raises(DeviceFailed) as caught:
        with filler.create(UNIT) as chunk:
            for _ in range(10):
                chunk.write(0, 8, Rows(0, 8), lambda window: None)
    assert chunk.fd.closed
    told = str(caught.value)
    assert told.startswith("copying to it failed on " + stand_in.devices[0])
    assert "ILLEGAL_ADDRESS (as the stand-in was told)" in told
    assert "Xid" in told
    filler.close()
    assert "ILLEGAL_ADDRESS" in caplog.text
    stand_in.end()
    caplog.clear()


def test_a_copy_that_does_not_arrive_is_told_by_finish(
    filler: VmmFiller, stand_in: StandIn
) -> None:
    with filler.create(UNIT) as chunk:
        chunk.write(0, 8, Rows(0, 8), lambda window: None)
        stand_in.fail("StreamSynchronize", BROKEN)
        with pytest.raises(DeviceFailed, match="copying to it"):
            chunk.finish()
        stand_in.fail("", 0)


def test_a_thread_keeps_the_device_it_had(stand_in: StandIn) -> None:
    stand_in.setenv("STAND_IN_DEVICES", ",".join(stand_in.devices))
    stand_in.setenv("STAND_IN_MEMORY", str(4 * UNIT))
    one, other = stand_in.open_ordinal(0), stand_in.open_ordinal(1)
    with one.current():
        handle = one.create(UNIT)
        with other.current():
            assert other.room() == (4 * UNIT, f"{stand_in.devices[1]} ({NAMES[stand_in.prefix]})")
        assert one.room()[0] == 3 * UNIT
        one.release(handle)
    one.close()
    other.close()


def test_unmapping_waits_for_the_device(
    filler: VmmFiller, mapper: VmmMapper, stand_in: StandIn
) -> None:
    mapping = mapped(filler, mapper, b"one")
    before = stand_in.alive()
    stand_in.fail("CtxSynchronize" if stand_in.prefix == "cu" else "DeviceSynchronize", BROKEN)
    with pytest.raises(DeviceFailed, match="waiting for its work"):
        mapping.close()
    assert stand_in.alive() == before  # what the device may still use stays
    stand_in.fail("", 0)
    mapping.close()
    assert stand_in.alive() < before


def test_threads_and_buffers_can_be_chosen(stand_in: StandIn) -> None:
    filler = VmmFiller(stand_in.open_ordinal(0), threads=3, buffers=1, longest=UNIT)
    assert filler.threads == 3
    with filler.create(UNIT) as chunk:
        for n in range(3):
            chunk.write(n, 1, Rows(0, 1), lambda window, n=n: put(window, bytes([n])))
        with pytest.raises(ValueError, match=str(UNIT)):
            chunk.write(0, UNIT + 1, Rows(0, 1), pytest.fail)
    filler.close()
    assert VmmFiller.__init__.__kwdefaults__["longest"] == MAX_SPAN


ENDING = f"""
import os, sys
from preloadd.linux.fds import OwnedFd
from preloadd.memory.api import Rows
from preloadd.memory.cuda.driver import open_ordinal
from preloadd.memory.vmm import VmmFiller, VmmMapper
filler = VmmFiller(open_ordinal(0), threads=1, longest={UNIT})
with filler.create({UNIT}) as chunk:
    chunk.finish()
    fd = chunk.fd.duplicate()
filler.close()
mapping = VmmMapper(open_ordinal(0)).map([(fd, {UNIT})])
buffer = mapping.chunk(0)
os.environ["STAND_IN_FAIL"] = "cuMemUnmap:205,cuCtxSynchronize:205,cuCtxPushCurrent:205"
print("ending", flush=True)
"""


def test_the_end_of_the_interpreter_calls_nothing(cuda: StandIn, drivers: Path) -> None:
    given = {**os.environ, **build.cuda(drivers), "STAND_IN_DEVICES": CUDA_DEVICES[0]}
    command = [sys.executable, "-c", ENDING]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ending\n", "")
    assert logging.getLogger("preloadd.memory.vmm").isEnabledFor(logging.WARNING)


def test_a_filler_without_threads_gives_its_device_up(stand_in: StandIn) -> None:
    before = stand_in.alive()
    driver = stand_in.open_ordinal(0)
    with threads_left(0), pytest.raises(PreloadError, match="no more threads"):
        VmmFiller(driver, threads=2, longest=UNIT)
    assert stand_in.alive() == before


@pytest.mark.parametrize(
    ("function", "told", "left"),
    # A chunk that stays mapped keeps its addresses: the mapping and the range are left.
    [("MemUnmap", "unmapping a chunk", 2), ("MemAddressFree", "giving addresses up", 1)],
)
def test_what_cannot_be_unmapped_is_told_once(
    filler: VmmFiller, stand_in: StandIn, function: str, told: str, left: int
) -> None:
    mapper = VmmMapper(stand_in.open_ordinal(0))
    before = stand_in.alive()
    mapping = mapped(filler, mapper, b"one", b"two", b"six")
    stand_in.fail(function, BROKEN, 1)
    with pytest.raises(DeviceFailed, match=told):
        mapping.close()
    stand_in.fail("", 0)
    assert stand_in.alive() == before + left
    mapping.close()
    del mapping
    gc.collect()
    mapper.map([])
    assert stand_in.alive() == before + left
    filler.close()
    stand_in.end()


def test_a_mapping_of_nothing_asks_nothing_of_the_device(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    driver = stand_in.open_ordinal(0)
    mapper = VmmMapper(driver)
    stand_in.fail("CtxSynchronize" if stand_in.prefix == "cu" else "DeviceSynchronize", LOST)
    mapper.map([]).close()
    mapper.map([])
    gc.collect()
    mapper.map([])
    assert not caplog.records
    stand_in.fail("", 0)
    driver.close()
