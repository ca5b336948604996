"""Folders as operators write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., Path]

GROUP = 'model = "/srv/m"\ngpus = ["CPU-0"]\n'


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files by their names below a configuration folder; returns the folder."""
    folder = tmp_path / "etc"
    (folder / "groups.d").mkdir(parents=True)
    (folder / "preloadd.toml.d").mkdir()

    def write(files: dict[str, str] | None = None) -> Path:
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        return folder

    return write
