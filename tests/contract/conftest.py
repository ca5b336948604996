"""The backends of memory, so that the same tests run on each."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from preloadd.memory.api import Filler, Keeper, Mapper
from preloadd.memory.host import HostFiller, HostKeeper, HostMapper


@dataclass(frozen=True)
class Backend:
    """What loader, rank and engine use of one backend, and how another process gets the same."""

    filler: Filler
    keeper: Keeper
    mapper: Mapper
    imports: str


def host() -> Backend:
    imports = "from preloadd.memory.host import HostFiller as Filler, HostMapper as Mapper"
    return Backend(HostFiller(), HostKeeper(), HostMapper(), imports)


BACKENDS = {"host": host}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


@pytest.fixture
def filler(backend: Backend) -> Filler:
    return backend.filler


@pytest.fixture
def keeper(backend: Backend) -> Keeper:
    return backend.keeper


@pytest.fixture
def mapper(backend: Backend) -> Mapper:
    return backend.mapper


@pytest.fixture
def imports(backend: Backend) -> str:
    """Source text that makes the backend's `Filler` and `Mapper` known."""
    return backend.imports
