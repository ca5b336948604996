"""Real rank daemons, each with a service manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import llama
from tests.manager import Manage, Manager, managing
from tests.ports import free_port


@pytest.fixture
def manage() -> Iterator[Manage]:
    with managing() as manage:
        yield manage


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return llama(tmp_path / "model")


@pytest.fixture
def manager(manage: Manage, model: Path) -> Manager:
    """A manager whose rank serves `model` in several chunks."""
    made = manage(model, chunk_bytes=1 << 16)
    made.start()
    made.ready()
    return made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """Like `manager`, one for a whole module: for tests that leave the rank as it is."""
    with managing() as manage:
        made = manage(llama(tmp_path_factory.mktemp("shared") / "model"), chunk_bytes=1 << 16)
        made.start()
        made.ready()
        yield made


@pytest.fixture
def port() -> int:
    """Where a rank may listen."""
    return free_port()
