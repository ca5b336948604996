"""Folders as operators write them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files by their names below a configuration folder; returns the folder."""
    folder = tmp_path / "etc"
    (folder / "groups.d").mkdir(parents=True)
    (folder / "preloadd.toml.d").mkdir()

    def write(files: dict[str, str] | None = None) -> Path:
        for name, text in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        return folder

    return write


@pytest.fixture
def nobody() -> Callable[[], AbstractContextManager[None]]:
    """Makes this process, which is root's, that of another user for a while."""

    @contextmanager
    def nobody() -> Iterator[None]:
        groups = os.getgroups()
        os.setgroups([])
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setgroups(groups)

    return nobody
