"""Descriptors of AMD's GPU memory. A dma-buf is made of a memfd, where the kernel has udmabuf."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from preloadd.errors import DamagedManifest
from preloadd.linux import memfd
from preloadd.memory.hip.keeper import DmaBufKeeper

SIZE = 16384
UDMABUF_CREATE = 0x40187542  # _IOW('u', 0x42, struct udmabuf_create)


@pytest.fixture
def dma_buf() -> Iterator[int]:
    try:
        device = os.open("/dev/udmabuf", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"this kernel makes no dma-bufs of memory: {error}")
    with memfd.create("pages") as pages:
        os.ftruncate(pages.fileno(), SIZE)
        memfd.seal(pages.fileno(), memfd.SEAL_SHRINK)
        order = struct.pack("IIQQ", pages.fileno(), 1, 0, SIZE)
        fd = fcntl.ioctl(device, UDMABUF_CREATE, order)
    os.close(device)
    yield fd
    os.close(fd)


def test_a_dma_buf_is_proven_by_its_size(dma_buf: int) -> None:
    DmaBufKeeper().seal(dma_buf, SIZE)
    DmaBufKeeper().verify(dma_buf, SIZE)
    for wrong in (SIZE - 1, 2 * SIZE, 0, -1):
        with pytest.raises(DamagedManifest, match=f"{SIZE} bytes instead of {wrong}"):
            DmaBufKeeper().verify(dma_buf, wrong)


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/status", "/"])
def test_whatever_else_is_damage(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    for prove in (DmaBufKeeper().seal, DmaBufKeeper().verify):
        with pytest.raises(DamagedManifest, match="dma-buf"):
            prove(fd, SIZE)
    os.close(fd)


def test_a_file_that_is_called_like_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "dmabuf:"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(DamagedManifest):
        DmaBufKeeper().verify(fd, SIZE)
    os.close(fd)
