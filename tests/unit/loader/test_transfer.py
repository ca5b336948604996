import mmap

import pytest

from preloadd.errors import ReadFailed
from preloadd.loader.pieces import pieces
from preloadd.loader.route import Way
from preloadd.loader.transfer import past_cache, through_cache
from preloadd.memory.api import ALIGNED, MAX_SPAN
from preloadd.weights.plan import Run
from tests.unit.loader.staged import DIRT

MIB = 1 << 20


def carried(transfer):
    """The wanted bytes of a dirty buffer after the transfer, and which way they came."""
    buffer = mmap.mmap(-1, -(-transfer.span // ALIGNED) * ALIGNED)
    buffer.write(DIRT * len(buffer))
    with memoryview(buffer) as view, view[: transfer.span] as window:
        way = transfer.fill(window)
        transfer.rows.check(transfer.span)
    found = bytearray()
    for row in range(transfer.rows.count):
        start = transfer.rows.skip + row * transfer.rows.stride
        found += buffer[start : start + transfer.rows.nbytes]
    buffer.close()
    return bytes(found), way


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 1768, 5 * MIB + 1234])
@pytest.mark.parametrize("nbytes", [1, 4096, MIB])
def test_a_run_comes_whole_either_way(shard, offset, nbytes):
    (piece,) = pieces([(Run(0, offset, nbytes, 1, nbytes), 0)])
    content = shard.content[offset : offset + nbytes]
    assert carried(through_cache(shard.opened(), piece)) == (content, Way.CACHE)
    assert carried(past_cache(shard.opened(), piece)) == (content, Way.DIRECT)


@pytest.mark.parametrize("offset", [0, 4090, 123_456])
def test_parts_come_to_their_places_and_the_padding_is_zeros(shard, offset):
    sizes, runs, expected, start = [5, 4, 600, 4096, 3, 70_000, 1], [], bytearray(), offset
    for nbytes in sizes:
        target = -(-len(expected) // 512) * 512
        expected += bytes(target - len(expected)) + shard.content[start : start + nbytes]
        runs.append((Run(0, start, nbytes, 1, nbytes), target))
        start += nbytes
    (piece,) = pieces(runs)
    assert carried(through_cache(shard.opened(), piece)) == (bytes(expected), Way.CACHE)
    assert carried(past_cache(shard.opened(), piece)) == (bytes(expected), Way.DIRECT)


def test_rows_come_without_what_lies_between_them(shard):
    (piece,) = pieces([(Run(0, 777, 100, 50, 1000), 0)])
    rows = b"".join(shard.content[777 + 1000 * row :][:100] for row in range(50))
    assert carried(through_cache(shard.opened(), piece)) == (rows, Way.CACHE)


@pytest.mark.parametrize("way", [through_cache, past_cache])
@pytest.mark.parametrize("sizes", [[9000], [4000, 5000]])
def test_an_error_keeps_nothing_of_the_buffer(shard, way, sizes):
    start, runs = len(shard.content) - 8000, []
    for nbytes in sizes:
        runs.append((Run(0, start, nbytes, 1, nbytes), 4096 * len(runs)))
        start += nbytes
    (piece,) = pieces(runs)
    transfer = way(shard.opened(), piece)
    buffer = mmap.mmap(-1, 4 * ALIGNED)
    with pytest.raises(ReadFailed, match="ends at byte") as caught:
        with memoryview(buffer) as view, view[: transfer.span] as window:
            transfer.fill(window)
    buffer.close()  # BufferError, if a frame of what was caught had some of it
    assert caught.tb


def test_a_file_that_is_refused_comes_through_the_cache_after_all(shard):
    (piece,) = pieces([(Run(0, 1, MIB, 1, MIB), 0)])
    refused = shard.opened(direct=False)
    assert carried(past_cache(refused, piece)) == (shard.content[1 : MIB + 1], Way.CACHE)


def test_the_longest_piece_fits_a_buffer_at_any_place(shard):
    for offset in (0, 1, 4095):
        for piece in pieces([(Run(0, offset, 64 * MIB, 1, 64 * MIB), 0)]):
            assert past_cache(shard.opened(), piece).span <= MAX_SPAN
