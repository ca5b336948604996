"""A host of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.admin.host import Host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    tmp_path.chmod(0o755)
    return Host(tmp_path)
