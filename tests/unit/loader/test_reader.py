import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from preloadd.errors import DeviceFailed, PreloadError, ReadFailed
from preloadd.loader.pieces import pieces
from preloadd.loader.reader import Readers
from preloadd.loader.route import Route
from preloadd.loader.source import OpenFile
from preloadd.loader.transfer import past_cache, through_cache
from preloadd.memory.host import HostFiller
from preloadd.weights.plan import Run
from tests.threads import threads_left
from tests.unit.loader.staged import StagedFiller

MIB = 1 << 20


def whole(offset, nbytes, file=0):
    return Run(file, offset, nbytes, 1, nbytes)


@pytest.fixture(params=["host", "staged", "device"])
def filler(request):
    if request.param == "device":
        return request.getfixturevalue("on_device")
    return HostFiller() if request.param == "host" else StagedFiller()


def read(files, wanted, chunk, *, threads, done=lambda _: None):
    """Fill one chunk."""
    with Readers(files, threads=threads) as readers:
        readers.wait(readers.start(chunk, wanted), done)


def held(chunk, nbytes, offset=0):
    return os.pread(chunk.fd.fileno(), nbytes, offset)


def test_runs_of_all_kinds_land_where_they_belong(filler, shard):
    told = []
    runs = [(whole(100, 50_000), 0), (Run(0, 7, 10, 300, 33), 50_176), (whole(9, 4), 60_000)]
    with filler.create(1 << 16) as chunk:
        read([shard.opened()], pieces(runs), chunk, threads=3, done=told.append)
        assert held(chunk, 50_000) == shard.content[100:50_100]
        assert held(chunk, 176, 50_000) == bytes(176)
        rows = b"".join(shard.content[7 + 33 * r : 17 + 33 * r] for r in range(300))
        assert held(chunk, 3000, 50_176) == rows
        assert held(chunk, 4, 60_000) == shard.content[9:13]
    assert sum(told) == 53_004


def test_what_is_wanted_counts_as_done_and_what_is_read_as_read(filler, shard):
    with filler.create(4096) as chunk, Readers([shard.opened()], threads=2) as readers:
        told = []
        batch = readers.start(chunk, pieces([(Run(0, 7, 10, 300, 33), 0)]))
        readers.wait(batch, told.append)
        assert (sum(told), readers.bytes_read) == (3000, 299 * 33 + 10)
        assert readers.bytes_direct == 0


def test_a_cold_file_is_read_past_the_cache_in_its_turn(shard):
    shard.drop()
    os.posix_fadvise(shard.fd, 0, 0, os.POSIX_FADV_RANDOM)  # or the first piece brings all others
    filler, length = StagedFiller(threads=1), len(shard.content)
    with filler.create(8 * MIB) as chunk:
        with Readers([shard.opened()], threads=1, route=Route(1)) as readers:
            batch = readers.start(chunk, pieces([(whole(0, length), 512)], MIB))
            readers.wait(batch, lambda _: None)
        assert held(chunk, length, 512) == shard.content
        assert readers.bytes_read == length
        # The first large piece went through the cache, the second did not; what is less than
        # 1 MiB never does.
        assert MIB <= readers.bytes_direct <= 5 * MIB


def test_a_warm_file_is_read_through_the_cache(shard):
    shard.drop()
    shard.path.read_bytes()
    filler = StagedFiller()
    with filler.create(8 * MIB) as chunk:
        with Readers([shard.opened()], threads=1, route=Route(1)) as readers:
            batch = readers.start(chunk, pieces([(whole(0, 6 * MIB), 0)], MIB))
            readers.wait(batch, lambda _: None)
        assert readers.bytes_direct == 0
    assert {span for span, _ in filler.spans} == {MIB}


def test_rows_never_go_past_the_cache(shard):
    shard.drop()
    with StagedFiller().create(4 * MIB) as chunk:
        with Readers([shard.opened()], threads=1, route=Route(1)) as readers:
            batch = readers.start(chunk, pieces([(Run(0, 0, 1000, 3000, 2000), 0)], MIB))
            readers.wait(batch, lambda _: None)
        assert (readers.bytes_read > 5 * MIB, readers.bytes_direct) == (True, 0)


def test_the_next_chunk_is_begun_while_one_is_waited_for(filler, shard):
    with filler.create(MIB) as first, filler.create(MIB) as second:
        with Readers([shard.opened()], threads=2) as readers:
            batches = [
                readers.start(first, pieces([(whole(0, MIB), 0)], 65_536)),
                readers.start(second, pieces([(whole(MIB, MIB), 0)], 65_536)),
            ]
            for batch in batches:
                readers.wait(batch, lambda _: None)
        assert held(first, MIB) + held(second, MIB) == shard.content[: 2 * MIB]


def test_a_chunk_is_finished_when_all_of_it_was_written(shard):
    filler = StagedFiller()
    filler.fails = DeviceFailed("GPU-0: CUDA_ERROR_ECC_UNCORRECTABLE")
    with filler.create(MIB) as chunk, pytest.raises(DeviceFailed, match="ECC"):
        read([shard.opened()], pieces([(whole(0, MIB), 0)], 4096), chunk, threads=4)
    assert ("finish", MIB) in filler.events


def test_a_file_that_ends_early_is_named(filler, shard):
    end = len(shard.content)
    with pytest.raises(ReadFailed, match=r"model\.safetensors ends at byte 6,292,690"):
        with filler.create(32_768) as chunk:
            read([shard.opened()], pieces([(whole(end - 9, 20_000), 0)]), chunk, threads=2)


def test_a_disk_error_names_file_and_place_and_stops_every_thread(filler, shard):
    # A read of a process's own unmapped memory fails with EIO, as a bad sector does.
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        files = [shard.opened(), OpenFile(Path("bad.safetensors"), fd)]
        runs = [(whole(0, 1000, file=1), 0), *((whole(0, 1000), 1000 * n) for n in range(1, 4000))]
        with filler.create(4 * MIB) as chunk, Readers(files, threads=2) as readers:
            batches = [readers.start(chunk, pieces(runs)), readers.start(chunk, [])]
            for batch in batches:
                with pytest.raises(
                    ReadFailed, match=r"bad\.safetensors: Input/output error: check the disk"
                ):
                    readers.wait(batch, lambda _: None)
            assert readers.bytes_read < 2_000_000
    finally:
        os.close(fd)


def parts_until(end):
    """Runs that follow each other in a file up to `end`, but not in the chunk."""
    return pieces([(whole(end - 3000, 1000), 0), (whole(end - 2000, 2000), 1024)])


@pytest.mark.parametrize("way", [through_cache, past_cache])
@pytest.mark.parametrize("parts", [False, True])
def test_a_file_that_ends_early_is_what_is_said_after_all_is_closed(on_device, shard, way, parts):
    end = len(shard.content) + 100
    wanted = parts_until(end) if parts else pieces([(whole(end - 9000, 9000), 0)])
    (piece,) = wanted
    transfer = way(shard.opened(), piece)
    with pytest.raises(ReadFailed, match="ends at byte"), closing(on_device):
        with on_device.create(MIB) as chunk:
            chunk.write(piece.target, transfer.span, transfer.rows, transfer.fill)


@pytest.mark.parametrize("way", [through_cache, past_cache])
def test_a_disk_error_is_what_is_said_after_all_is_closed(on_device, shard, way):
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    (piece,) = parts_until(100_000)
    transfer = way(OpenFile(Path("bad.safetensors"), fd, fd), piece)
    with pytest.raises(ReadFailed, match="Input/output error"), closing(on_device):
        with on_device.create(MIB) as chunk:
            chunk.write(piece.target, transfer.span, transfer.rows, transfer.fill)
    os.close(fd)


def test_whoever_waits_may_give_up(filler, shard):
    def gone(_):
        raise BrokenPipeError

    threads = threading.active_count()
    with filler.create(4 * MIB) as chunk, pytest.raises(BrokenPipeError):
        read([shard.opened()], pieces([(whole(0, 4 * MIB), 0)], 4096), chunk, threads=3, done=gone)
    assert threading.active_count() == threads


def test_nothing_to_read_is_nothing_done(filler, shard):
    told = []
    with filler.create(4096) as chunk:
        read([shard.opened()], [], chunk, threads=2, done=told.append)
    assert sum(told) == 0


@pytest.mark.parametrize("more", [0, 1])
def test_readers_that_get_no_threads_say_so_and_leave_none(shard, more):
    told = r"reading the checkpoint: .*ulimit"
    with threads_left(more), pytest.raises(PreloadError, match=told):
        Readers([shard.opened()], threads=4)


def test_what_keeps_a_thread_from_writing_reaches_whoever_waits(shard, filler):
    def broken():
        raise RuntimeError("no driver")

    with (
        Readers([shard.opened()], threads=1, writing=broken) as readers,
        filler.create(MIB) as chunk,
        pytest.raises(RuntimeError, match="no driver"),
    ):
        readers.wait(readers.start(chunk, []), lambda _: None)


def test_after_an_error_nothing_else_is_begun(filler, shard):
    end = len(shard.content)
    runs = [(whole(end - 9, 1000), 0), *((whole(0, 1000), 1024 * n) for n in range(1, 4))]
    with filler.create(MIB) as chunk, Readers([shard.opened()], threads=1) as readers:
        wanted = [piece for run in runs for piece in pieces([run])]
        with pytest.raises(ReadFailed, match="ends at byte"):
            readers.wait(readers.start(chunk, wanted), lambda _: None)
        time.sleep(0.1)  # the thread goes on, but not with that
        assert readers.bytes_read == 0
