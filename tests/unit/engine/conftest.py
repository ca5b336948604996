"""A real daemon for a whole module, and what its tests need to attach to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from preloadd.errors import DeviceFailed
from preloadd.memory.host import HostMapper
from tests.checkpoints import llama
from tests.manager import Manager, managing


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A rank that serves a small Llama in several chunks. Tests leave it as they found it."""
    with managing() as manage:
        manager = manage(llama(tmp_path_factory.mktemp("engine") / "model"), chunk_bytes=1 << 16)
        manager.start()
        manager.ready()
        yield manager


@pytest.fixture
def own_daemon(model: Path) -> Iterator[Manager]:
    """The same for a single test, which may have it free its weights."""
    with managing() as manage:
        manager = manage(model, chunk_bytes=1 << 16)
        manager.start()
        manager.ready()
        yield manager


@pytest.fixture
def model(daemon: Manager) -> Path:
    return Path(daemon.settings.model.path)


class Lost(HostMapper):
    """Maps memory of a device that is lost by the time it is to be unmapped."""

    def map(self, chunks):
        mapping = super().map(chunks)
        unmap = mapping.close

        def close():
            unmap()
            raise DeviceFailed("the GPU is lost")

        mapping.close = close
        return mapping


@pytest.fixture
def lost():
    return Lost()
