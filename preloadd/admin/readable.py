"""Whether this user can read every file of a model's folder.

It says which part of the path is closed, since permissions of a folder far up are what people do
not think of.
"""

from __future__ import annotations

import os
from pathlib import Path


def closed(folder: Path) -> str:
    """What keeps this user from reading `folder` and the files in it; empty if nothing does."""
    for above in reversed([folder, *folder.parents]):
        try:
            above.stat()
        except OSError as error:
            return f"{above}: {error.strerror}"
        if not os.access(above, os.X_OK, effective_ids=True):
            return f"{above}: no permission to enter it"
    try:
        names = sorted(folder.iterdir())
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return next((why for path in names if (why := _closed_file(path))), "")


def _closed_file(path: Path) -> str:
    try:
        if path.is_file():
            with path.open("rb"):
                pass
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""
