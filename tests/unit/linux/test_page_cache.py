"""What is asked of the real page cache, about files on the disk that the tests are run on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from preloadd.linux.page_cache import counted, holds, looked_up

PAGE = os.sysconf("SC_PAGESIZE")
FAR = 1 << 20
"""So far behind a page that is read that it is not read with it."""


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file of which the page cache holds nothing but the first page, and what comes along."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2 * FAR))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(fd, 1, 0)
        yield fd
    finally:
        os.close(fd)


def test_what_is_held_is_told_to_the_page(fd: int) -> None:
    if counted(fd, 0) is None:
        pytest.skip("this kernel has no cachestat, which came with Linux 6.5")
    assert [holds(fd, place) for place in (0, PAGE - 1, FAR)] == [True, True, False]


def test_asking_reads_nothing(fd: int) -> None:
    if counted(fd, 0) is None:
        pytest.skip("this kernel has no cachestat, which came with Linux 6.5")
    assert [holds(fd, FAR) for _ in range(100)] == [False] * 100


def test_older_kernels_read_what_is_held(fd: int) -> None:
    if looked_up(fd, 0) is None:
        pytest.skip("the file system of the tests does not have RWF_NOWAIT")
    assert looked_up(fd, 0) is True
    # Whether it holds something else may be found wrongly, as the docstring says.
    assert looked_up(fd, FAR) in (True, False)


def test_what_cannot_be_asked_is_not_told(fd: int, tmp_path: Path) -> None:
    nameless = os.open(tmp_path / "file", os.O_PATH)
    try:
        assert holds(nameless, 0) is None
    finally:
        os.close(nameless)


def test_nothing_is_held_behind_the_end(fd: int) -> None:
    assert not counted(fd, 4 * FAR)
