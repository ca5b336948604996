from __future__ import annotations

from pathlib import Path

import pytest

from preloadd.errors import CheckpointError
from preloadd.weights.checkpoint.lfs import MAX_NBYTES, refuse_pointers

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def test_names_all_pointers_and_only_them(tmp_path: Path) -> None:
    contents = {
        "a": POINTER,
        "b": b"",
        "c": POINTER + bytes(MAX_NBYTES),
        "d": POINTER[:-1],
        "e": b"version https://",
        "f": b"x" + POINTER,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [tmp_path / name for name in contents]
    with pytest.raises(CheckpointError) as caught:
        refuse_pointers(paths)
    assert str(caught.value) == (
        f"{tmp_path}: a, d are Git-LFS pointers instead of the file itself: "
        "run `git lfs pull` in that folder"
    )
    refuse_pointers(path for path in paths if path.name not in "ad")


def test_leaves_missing_files_to_others(tmp_path: Path) -> None:
    refuse_pointers([tmp_path / "nowhere"])


def test_follows_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(POINTER)
    (tmp_path / "link").symlink_to("blob")
    with pytest.raises(CheckpointError, match="link is a Git-LFS pointer"):
        refuse_pointers([tmp_path / "link"])
