import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preloadd.errors import ReadFailed
from preloadd.loader import reader
from preloadd.loader.reader import OpenFile, Piece, pieces, read


@pytest.fixture(scope="module")
def content():
    return random.Random(7).randbytes(100_000)


@pytest.fixture
def shard(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    yield OpenFile(path, fd)
    os.close(fd)


def fill(shard, wanted, nbytes, threads=3):
    window = bytearray(nbytes)
    told = []
    read([shard], list(wanted), memoryview(window), threads=threads, done=told.append)
    return bytes(window), sum(told)


@given(
    row=st.integers(1, 5000),
    rows=st.integers(1, 50),
    gap=st.integers(0, 100),
    offset=st.integers(0, 1000),
    target=st.integers(0, 3),
    piece=st.integers(1, 4000),
    scratch=st.integers(1, 9000),
)
@settings(max_examples=200)
def test_pieces_cover_a_run_exactly_and_stay_bounded(
    row, rows, gap, offset, target, piece, scratch
):
    old = reader.PIECE, reader.SCRATCH
    reader.PIECE, reader.SCRATCH = piece, scratch
    try:
        cut = list(pieces(0, offset, row, rows, row + gap, target))
    finally:
        reader.PIECE, reader.SCRATCH = old
    covered = [
        (p.offset + r * p.stride + i, p.target + r * p.row_nbytes + i)
        for p in cut
        for r in range(p.rows)
        for i in (0, p.row_nbytes - 1)
    ]
    assert all(source - offset >= 0 and place >= target for source, place in covered)
    assert sum(p.row_nbytes * p.rows for p in cut) == row * rows
    place = target
    for p in cut:
        assert p.target == place
        place += p.row_nbytes * p.rows
        within, column = divmod(p.offset - offset, row + gap)
        assert within * row + column == p.target - target
        assert p.rows > 1 or p.row_nbytes <= max(piece, min(row, scratch))
        assert p.rows == 1 or p.rows * p.stride <= scratch


def test_strided_and_whole_runs_land_where_they_belong(shard, content):
    wanted = [*pieces(0, 100, 50_000, 1, 50_000, 0), *pieces(0, 7, 10, 300, 33, 50_000)]
    window, read_bytes = fill(shard, wanted, 53_000)
    assert window[:50_000] == content[100:50_100]
    assert window[50_000:] == b"".join(content[7 + 33 * r : 17 + 33 * r] for r in range(300))
    assert read_bytes == 50_000 + 299 * 33 + 10


def test_a_file_that_ends_early_is_named(shard):
    with pytest.raises(ReadFailed, match=r"model\.safetensors ends at byte 100,000"):
        fill(shard, [Piece(0, 90_000, 20_000, 1, 20_000, 0)], 20_000)


def test_a_disk_error_names_file_and_place_and_stops_every_thread(shard):
    # A read of a process's own unmapped memory fails with EIO, as a bad sector does.
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        bad = OpenFile(Path("bad.safetensors"), fd)
        wanted = [Piece(0, 0, 1000, 1, 1000, 0), Piece(1, 0, 1000, 1, 1000, 1000)]
        with pytest.raises(
            ReadFailed, match=r"bad\.safetensors: Input/output error: check the disk"
        ):
            read([shard, bad], wanted, memoryview(bytearray(2000)), threads=2, done=lambda _: None)
    finally:
        os.close(fd)


def test_nothing_to_read_is_nothing_done(shard):
    assert fill(shard, [], 0) == (b"", 0)
