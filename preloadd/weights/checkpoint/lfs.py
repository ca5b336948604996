"""Git-LFS pointers: what a clone without git-lfs leaves where the weights should be."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from preloadd.errors import CheckpointError
from preloadd.weights.checkpoint.identity import identify
from preloadd.weights.checkpoint.reading import opened, read_at

MAX_NBYTES = 1024
"""Pointer files are smaller than this many bytes, says their specification."""

_START = b"version https://git-lfs.github.com/spec/"


def refuse_pointers(paths: Iterable[Path]) -> None:
    """CheckpointError naming every one of the files that is a pointer; opens only tiny files."""
    pointers = [path for path in paths if _is_tiny(path) and _head(path) == _START]
    if pointers:
        folder = pointers[0].parent
        names = ", ".join(path.name for path in pointers)
        holds = "is a Git-LFS pointer" if len(pointers) == 1 else "are Git-LFS pointers"
        raise CheckpointError(
            f"{folder}: {names} {holds} instead of the file itself: "
            "run `git lfs pull` in that folder"
        )


def _is_tiny(path: Path) -> bool:
    try:
        return identify(path).size < MAX_NBYTES
    except OSError:
        return False  # whoever opens the file says what is wrong with it


def _head(path: Path) -> bytes:
    with opened(path) as fd:
        return read_at(fd, min(len(_START), identify(fd).size), 0, path)
