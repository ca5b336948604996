"""Descriptors of GPU memory, proven without a driver: the node is another here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preloadd.errors import DamagedManifest
from preloadd.memory.cuda.keeper import DeviceKeeper


@pytest.fixture
def chunk() -> int:
    fd = os.open("/dev/full", os.O_RDWR)
    yield fd
    os.close(fd)


def test_an_open_file_of_the_node_is_taken_for_a_chunk(chunk: int) -> None:
    keeper = DeviceKeeper("/dev/full")
    keeper.seal(chunk, 1 << 40)
    keeper.verify(chunk, 1)


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/status", "/"])
def test_whatever_else_is_damage(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    for prove in (DeviceKeeper("/dev/full").seal, DeviceKeeper("/dev/full").verify):
        with pytest.raises(DamagedManifest, match="/dev/full"):
            prove(fd, 4096)
    os.close(fd)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_chunk_has_bytes(chunk: int, nbytes: int) -> None:
    with pytest.raises(DamagedManifest, match=str(nbytes)):
        DeviceKeeper("/dev/full").verify(chunk, nbytes)


def test_where_the_node_is_hidden_its_number_counts(chunk: int, tmp_path: Path) -> None:
    with pytest.raises(DamagedManifest):
        DeviceKeeper(str(tmp_path / "nvidiactl")).verify(chunk, 4096)


@pytest.mark.root
def test_the_number_is_that_of_nvidia(tmp_path: Path) -> None:
    node = tmp_path / "node"
    try:
        os.mknod(node, 0o020600, os.makedev(195, 255))
        fd = os.open(node, os.O_PATH)
    except OSError as error:
        pytest.skip(f"no devices can be made here: {error}")
    DeviceKeeper(str(tmp_path / "nvidiactl")).verify(fd, 4096)
    os.close(fd)


IMPORTING = "import sys, preloadd.memory.cuda.keeper, preloadd.memory.hip.keeper\n"
IMPORTING += "print([name for name in sys.modules if name in ('cuda', 'ctypes', 'pynvml')])"


def test_a_keeper_needs_no_driver() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
