from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.errors import ProtocolViolation
from preloadd.linux import memfd
from preloadd.linux.fds import OwnedFd

LIMIT = 1 << 20


def test_a_new_memfd_is_close_on_exec_named_and_open_for_seals() -> None:
    with memfd.create("apple") as fd:
        assert not os.get_inheritable(fd.fileno())
        assert "memfd:apple" in Path(f"/proc/self/fd/{fd.fileno()}").readlink().name
        memfd.seal(fd.fileno(), memfd.SEAL_GROW)
        assert memfd.seals(fd.fileno()) & memfd.SEAL_GROW


def test_a_name_too_long_for_the_kernel_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        memfd.create("x" * 250)


def test_writing_is_not_sealed_while_a_writable_mapping_exists() -> None:
    with memfd.create("mapped") as fd:
        os.ftruncate(fd.fileno(), 4096)
        with mmap.mmap(fd.fileno(), 4096), pytest.raises(OSError, match="busy"):
            memfd.seal(fd.fileno(), memfd.SEAL_WRITE)
        memfd.seal(fd.fileno(), memfd.SEAL_WRITE)


@given(st.binary(max_size=10_000))
def test_sealed_bytes_come_back(data: bytes) -> None:
    with memfd.sealed_bytes("payload", data) as fd:
        assert memfd.read_sealed(fd.fileno(), LIMIT) == data


def test_large_and_wide_buffers_come_back_whole() -> None:
    data = os.urandom(1 << 20)
    with memfd.sealed_bytes("payload", memoryview(data).cast("Q")) as fd:
        assert memfd.read_sealed(fd.fileno(), LIMIT) == data
        # Wherever the shared file offset was left.
        os.lseek(fd.fileno(), 17, os.SEEK_SET)
        assert memfd.read_sealed(fd.fileno(), LIMIT) == data


def test_sealed_bytes_cannot_be_changed_in_any_way() -> None:
    with memfd.sealed_bytes("payload", b"x" * 4096) as fd:
        number = fd.fileno()
        for attempt in (
            lambda: os.pwrite(number, b"y", 0),
            lambda: os.ftruncate(number, 0),
            lambda: os.ftruncate(number, 8192),
            lambda: mmap.mmap(number, 4096),
            lambda: memfd.seal(number, memfd.SEAL_FUTURE_WRITE),
        ):
            with pytest.raises(PermissionError):
                attempt()


def test_nothing_stays_open_when_the_data_are_no_bytes() -> None:
    with pytest.raises(TypeError):
        memfd.sealed_bytes("payload", "text")  # type: ignore[arg-type]


def with_seals(seals: int) -> OwnedFd:
    fd = memfd.create("payload")
    os.write(fd.fileno(), b"data")
    memfd.seal(fd.fileno(), seals)
    return fd


def test_a_payload_sealed_against_future_writers_is_read() -> None:
    with with_seals(memfd.FIXED_SIZE | memfd.SEAL_FUTURE_WRITE) as fd:
        assert memfd.read_sealed(fd.fileno(), LIMIT) == b"data"


@pytest.mark.parametrize(
    "seals",
    [
        0,
        memfd.SEAL_SEAL,
        memfd.FIXED_SIZE,
        memfd.SEAL_WRITE,
        memfd.SEAL_SHRINK | memfd.SEAL_WRITE,
        memfd.SEAL_GROW | memfd.SEAL_WRITE,
    ],
)
def test_a_payload_that_could_still_change_is_refused(seals: int) -> None:
    with with_seals(seals) as fd, pytest.raises(ProtocolViolation, match="unsealed"):
        memfd.read_sealed(fd.fileno(), LIMIT)


def test_a_payload_over_the_limit_is_refused_with_both_numbers() -> None:
    with memfd.sealed_bytes("payload", bytes(11)) as fd:
        with pytest.raises(ProtocolViolation, match=r"11 bytes, 10 at most"):
            memfd.read_sealed(fd.fileno(), 10)
        assert len(memfd.read_sealed(fd.fileno(), 11)) == 11


def test_what_is_no_memfd_is_refused(tmp_path: Path) -> None:
    reader, writer = map(OwnedFd, os.pipe())
    folder = OwnedFd(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    location = OwnedFd(os.open(tmp_path, os.O_PATH))
    with reader, writer, folder, location:
        for fd in (reader, writer, folder, location):
            with pytest.raises(ProtocolViolation, match="memfd"):
                memfd.read_sealed(fd.fileno(), LIMIT)


def test_a_file_on_a_tmpfs_is_refused() -> None:
    with OwnedFd(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)) as fd:
        assert memfd.seals(fd.fileno()) == memfd.SEAL_SEAL
        with pytest.raises(ProtocolViolation, match="unsealed"):
            memfd.read_sealed(fd.fileno(), LIMIT)


def test_a_descriptor_that_cannot_be_read_is_refused() -> None:
    with with_seals(memfd.FIXED_SIZE | memfd.SEAL_FUTURE_WRITE) as fd:
        # A sealed memfd can be opened for writing, just not written.
        with OwnedFd(os.open(f"/proc/self/fd/{fd.fileno()}", os.O_WRONLY)) as blind:
            with pytest.raises(ProtocolViolation, match="cannot be read"):
                memfd.read_sealed(blind.fileno(), LIMIT)
