from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from preloadd.errors import CheckpointError, OutOfDescriptors, ReadFailed
from preloadd.weights.checkpoint import identify
from preloadd.weights.checkpoint.reading import (
    missing,
    opened,
    read_at,
    read_into,
    refused,
    unchanged,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(b"0123456789")
    return path


def test_follows_links_and_does_not_leak_into_children(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    with opened(link) as fd:
        assert read_at(fd, 3, 4, link) == b"456"
        assert not os.get_inheritable(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_reads_into_place(path: Path) -> None:
    room = bytearray(b"----------")
    with opened(path) as fd, memoryview(room) as view:
        read_into(fd, view[2:5], 7, path)
        read_into(fd, view[:0], 99, path)
    assert room == b"--789-----"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="nowhere is missing: download"),
        opened(tmp_path / "nowhere"),
    ):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match="below is missing"),
        opened(tmp_path / "file" / "below"),
    ):
        pass


def test_a_dangling_link_is_called_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "blob")
    with (
        pytest.raises(CheckpointError, match="link is a link to a file that is gone"),
        opened(link),
    ):
        pass
    assert "download the model again" in missing(link)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_without_waiting(make, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(CheckpointError, match="thing is not a regular file"), opened(path):
        pass


def test_a_disk_error_names_the_file() -> None:
    # The first page of a process is never mapped, and reading it is EIO.
    path = Path("/proc/self/mem")
    with pytest.raises(ReadFailed, match=r"/proc/self/mem: Input/output error: check the disk"):
        with opened(path) as fd:
            read_at(fd, 1, 0, path)


def test_the_descriptor_limit_is_named(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(
            OutOfDescriptors, match=r"shard: Too many open files: raise.*LimitNOFILE"
        ):
            with opened(path):
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_early_end_names_the_file(path: Path) -> None:
    with pytest.raises(ReadFailed, match=r"shard ends at byte 10, before 12: .* load again"):
        with opened(path) as fd:
            read_at(fd, 5, 7, path)


def test_a_refusal_names_file_and_remedy() -> None:
    told = refused(Path("/m/shard"), PermissionError(13, "Permission denied"))
    assert told == "/m/shard: Permission denied: let the user that preloadd runs as read it"


def test_an_unchanged_file_is_fine(path: Path) -> None:
    with unchanged(path, identify(path)) as fd:
        assert read_at(fd, 10, 0, path) == b"0123456789"


def test_a_file_changed_before_is_named(maker, path: Path) -> None:
    identity = identify(path)
    maker.rewrite(path, b"9876543210")
    with (
        pytest.raises(ReadFailed, match=r"shard changed while .* then load again"),
        unchanged(path, identity),
    ):
        pytest.fail("must not be read")


def test_a_file_changed_meanwhile_is_named(maker, path: Path) -> None:
    with pytest.raises(ReadFailed, match="shard changed while"), unchanged(path, identify(path)):
        maker.rewrite(path, b"9876543210")
