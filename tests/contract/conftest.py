"""Backends of memory, for the same tests on each."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from preloadd.memory.api import Filler, Keeper, Mapper
from preloadd.memory.host import HostFiller, HostKeeper, HostMapper


@dataclass(frozen=True)
class Backend:
    """One backend: what its loader, rank and engine use."""

    name: str
    filler: Filler
    keeper: Keeper
    mapper: Mapper


def host() -> Backend:
    return Backend("host", HostFiller(), HostKeeper(), HostMapper())


BACKENDS = {"host": host}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()
