import mmap
import os
from pathlib import Path

import pytest

from preloadd.errors import OutOfDescriptors, ReadFailed
from preloadd.loader.source import OpenFile, opened_direct
from preloadd.memory.api import ALIGNED

MIB = 1 << 20


@pytest.fixture
def buffer():
    """Memory that starts at a page."""
    area = mmap.mmap(-1, 2 * MIB)
    with memoryview(area) as view:
        yield view
    area.close()


def test_the_page_cache_is_looked_into_without_filling_it(shard):
    shard.drop()
    shard.path.read_bytes()
    assert shard.opened().cached(0, 6 * MIB) is True
    shard.drop()
    assert shard.opened().cached(3 * MIB, MIB) is False
    assert shard.opened().cached(4 * MIB, MIB) is False


def test_a_piece_of_which_only_an_end_is_cached_is_not(shard):
    shard.drop()
    os.pread(shard.fd, 4096, 0)
    assert shard.opened().cached(0, 1) is True
    assert shard.opened().cached(0, 6 * MIB) is False
    shard.drop()
    os.pread(shard.fd, 4096, 6 * MIB - 4096)
    assert shard.opened().cached(0, 6 * MIB) is False


def test_what_was_warm_is_looked_into_at_one_place_until_it_is_not(shard):
    shard.drop()
    shard.path.read_bytes()
    file = shard.opened()
    assert file.cached(0, 6 * MIB) is True
    shard.drop()
    assert file.cached(0, 6 * MIB) is False
    os.pread(shard.fd, 4096, 2 * MIB - ALIGNED)
    # Where that one place is cached, the others count again.
    assert file.cached(0, 6 * MIB) is False


def test_a_kernel_that_does_not_tell_is_not_asked_again(shard):
    fd = os.open(shard.path, os.O_PATH)  # with which nothing can be done
    try:
        file = OpenFile(shard.path, fd)
        assert file.cached(0, 8192) is None
        os.dup2(shard.fd, fd)
        shard.path.read_bytes()
        assert file.cached(0, 8192) is None
    finally:
        os.close(fd)


def test_the_direct_descriptor_is_of_the_file_that_was_opened(shard, buffer):
    other = shard.path.with_name("other")
    other.write_bytes(bytes(len(shard.content)))
    other.rename(shard.path)
    with opened_direct(shard.fd) as direct:
        assert os.preadv(direct, [buffer], 0) == len(buffer)
    assert bytes(buffer) == shard.content[: len(buffer)]


def test_what_cannot_be_opened_so_is_read_through_the_cache(buffer):
    with Path("/proc/version").open("rb") as file, opened_direct(file.fileno()) as direct:
        assert direct is None
        source = OpenFile(Path("/proc/version"), file.fileno(), direct)
        assert not source.direct
        assert source.read_direct(buffer[:4096], 0, 5) is False
        assert bytes(buffer[:5]) == b"Linux"


def test_a_lack_of_descriptors_names_the_limit(shard, descriptors_left):
    with descriptors_left(0), pytest.raises(OutOfDescriptors, match=r"past the page .*ulimit -n"):
        with opened_direct(shard.fd):
            pytest.fail("there is none to be had")


class Overtaken(OpenFile):
    """Another thread finds that O_DIRECT does not do here, just after this one has looked."""

    @property
    def _direct(self):
        fd, self._left = self._left, None
        return fd

    @_direct.setter
    def _direct(self, fd):
        self._left = fd


def test_a_piece_is_read_as_it_was_begun_whatever_other_threads_find(shard, buffer):
    file = Overtaken(shard.path, shard.fd, shard.direct)
    assert file.read_direct(buffer, MIB, len(buffer)) is True
    assert bytes(buffer) == shard.content[MIB : 3 * MIB]
    assert not file.direct


def test_blocks_are_read_past_the_cache(shard, buffer):
    shard.drop()
    file = shard.opened()
    assert file.read_direct(buffer, 3 * MIB, len(buffer)) is True
    assert bytes(buffer) == shard.content[3 * MIB : 5 * MIB]
    assert file.cached(3 * MIB, MIB) is False


@pytest.mark.parametrize("wanted", [1234, 1000, 4096 + 1234])
def test_the_end_of_a_file_need_not_be_a_whole_block(shard, buffer, wanted):
    start = 6 * MIB - (4096 if wanted > 4096 else 0)
    file = shard.opened()
    assert file.read_direct(buffer[:8192], start, wanted) is True
    assert bytes(buffer[:wanted]) == shard.content[start : start + wanted]


@pytest.mark.parametrize("start", [6 * MIB, 5 * MIB, 7 * MIB])
def test_a_file_that_ends_early_is_named(shard, buffer, start):
    with pytest.raises(ReadFailed, match=r"model\.safetensors ends at byte [67],"):
        shard.opened().read_direct(buffer, start, len(buffer))


def test_memory_or_places_that_do_not_do_for_it_are_read_through_the_cache_from_then_on(
    shard, buffer
):
    file = shard.opened()
    with buffer[1 : 1 + ALIGNED] as odd:
        if file.read_direct(odd, 0, ALIGNED):
            pytest.skip("this disk reads to any address")
        assert bytes(odd) == shard.content[:ALIGNED]
    assert not file.direct
    assert file.read_direct(buffer, MIB, len(buffer)) is False
    assert bytes(buffer) == shard.content[MIB : 3 * MIB]


def test_a_disk_error_is_not_tried_again_the_other_way(shard, buffer):
    # A read of a process's own unmapped memory fails with EIO, as a bad sector does.
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        bad = OpenFile(Path("bad.safetensors"), shard.fd, fd)
        with pytest.raises(ReadFailed, match=r"bad\.safetensors: Input/output error: check"):
            bad.read_direct(buffer, 0, len(buffer))
        with pytest.raises(ReadFailed, match=r"bad\.safetensors: Input/output error: check"):
            OpenFile(Path("bad.safetensors"), fd).scatter([buffer], 0)
    finally:
        os.close(fd)


def test_many_places_are_filled_by_one_call(shard, buffer):
    targets = [buffer[0:10], buffer[512:1000], buffer[1024:1030]]
    shard.opened().scatter(targets, 77)
    assert b"".join(targets) == shard.content[77 : 77 + 504]
    assert bytes(buffer[10:512]) == bytes(502)


def test_the_end_of_a_file_in_the_midst_of_places_is_named(shard, buffer):
    with pytest.raises(ReadFailed, match="ends at byte"):
        shard.opened().scatter([buffer[:1000], buffer[1000:3000]], 6 * MIB)
    assert bytes(buffer[:1000]) == shard.content[6 * MIB : 6 * MIB + 1000]
