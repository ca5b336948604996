"""The code that comes with a checkpoint, as a short text: equal texts mean equal files."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from preloadd.errors import ReadFailed
from preloadd.weights.checkpoint.folder import read_document
from preloadd.weights.checkpoint.reading import refused


def code_of(folder: Path) -> str:
    """The digest of every Python file in `folder`, and of its place there; '' if there is none.

    ReadFailed names a file or folder that cannot be read. CheckpointError as of `read_document`.
    """
    try:
        paths = sorted(folder.rglob("*.py"))
    except OSError as error:
        raise ReadFailed(refused(folder, error)) from error
    hasher = blake3()
    for path in paths:
        document = read_document(path)
        for part in (str(path.relative_to(folder)).encode(), document.content):
            hasher.update(blake3(part).digest())
    return f"blake3:{hasher.hexdigest()}" if paths else ""
