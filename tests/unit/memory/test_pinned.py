"""Host memory to be pinned."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import resource
from pathlib import Path

import pytest

from preloadd.errors import OutOfRoom
from preloadd.memory import pinned
from preloadd.memory.pinned import LARGE_PAGE

SIZE = (16 << 20) + 8192


def kernel_tells(address: int) -> tuple[int, set[str]]:
    """Bytes that are there of the mapping around an address, and its flags."""
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(n, 16) for n in block.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            (rss,) = re.findall(r"^Rss:\s+(\d+) kB", block, re.MULTILINE)
            (flags,) = re.findall(r"^VmFlags: (.*)$", block, re.MULTILINE)
            return int(rss) * 1024, set(flags.split())
    raise AssertionError("nothing is mapped there")


def test_memory_is_there_aligned_and_kept_from_children() -> None:
    memory = pinned.allocate(SIZE)
    assert memory.address % LARGE_PAGE == 0
    assert memory.address == ctypes.addressof(ctypes.c_char.from_buffer(memory.view))
    assert len(memory.view) == SIZE
    there, flags = kernel_tells(memory.address)
    assert there >= SIZE
    assert {"dc", "hg"} <= flags
    memory.view[-1] = 1
    gc.collect()  # the ctypes object above
    memory.release()


def test_memory_in_use_goes_with_the_last_view_of_it() -> None:
    memory = pinned.allocate(mmap.PAGESIZE)
    address, used = memory.address, memory.view[:10]
    memory.release()
    del memory
    assert kernel_tells(address)
    used.release()
    with pytest.raises(AssertionError, match="nothing is mapped"):
        kernel_tells(address)


def test_memory_that_is_in_use_as_a_whole_goes_as_late() -> None:
    memory = pinned.allocate(mmap.PAGESIZE)
    address, used = memory.address, ctypes.c_char.from_buffer(memory.view)
    memory.release()
    del memory
    gc.collect()
    assert kernel_tells(address)
    del used
    gc.collect()
    with pytest.raises(AssertionError, match="nothing is mapped"):
        kernel_tells(address)


def test_memory_that_the_kernel_refuses_names_what_bounds_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, before[1]))
    try:
        with pytest.raises(
            OutOfRoom, match=r"another 1,099,511,627,776 bytes .*pinned \(`ulimit -l`"
        ):
            pinned.allocate(1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_memory_of_a_driver_is_only_looked_at() -> None:
    theirs = ctypes.create_string_buffer(b"theirs", 100)
    memory = pinned.foreign(ctypes.addressof(theirs), 100)
    assert bytes(memory.view[:6]) == b"theirs"
    memory.view[:6] = b"filled"
    memory.release()
    assert theirs.value == b"filled"
