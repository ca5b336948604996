from __future__ import annotations

import os
from pathlib import Path

import pytest

from preloadd.domain.files import FileIdentity
from preloadd.weights.checkpoint import identify


def test_path_link_and_descriptor_give_the_same(tmp_path: Path) -> None:
    blob, link = tmp_path / "blob", tmp_path / "link"
    blob.write_bytes(b"12345")
    link.symlink_to(blob)
    os.utime(blob, ns=(1, 1_234_567_891))
    seen = blob.stat()
    with blob.open("rb") as file:
        assert identify(file.fileno()) == identify(blob) == identify(link)
    assert identify(blob) == FileIdentity(
        seen.st_dev, seen.st_ino, 5, 1_234_567_891, seen.st_ctime_ns
    )


def test_a_restored_modification_time_does_not_hide_a_change(maker, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    before = identify(path)
    maker.rewrite(path, b"new")
    os.utime(path, ns=(before.mtime_ns, before.mtime_ns))
    assert identify(path).mtime_ns == before.mtime_ns
    assert identify(path) != before


def test_a_copy_is_another_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"same")
    assert identify(tmp_path / "a") != identify(tmp_path / "b")


def test_the_systems_error_passes_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        identify(tmp_path / "nothing")
