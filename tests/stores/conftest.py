"""A real Mooncake on a network of its own.

Where it is not installed, or there can be no such network, tests are skipped; under CI, which is
told to provide for both, they fail.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from preloadd.warmup.stores.chain import Stores
from preloadd.warmup.stores.mooncake_config import read_config
from preloadd.warmup.stores.mooncake_store import MooncakeStore
from preloadd.warmup.stores.worker import Worker
from tests.needs import impossible
from tests.stores.namespace import NoNetwork, own_network
from tests.stores.servers import Mooncake

PAUSE_S = 0.5
"""Before a store that failed is tried again."""


@pytest.fixture(scope="session")
def library() -> None:
    """Mooncake's library and servers."""
    command = [sys.executable, "-c", "import mooncake.store"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        impossible(f"Mooncake cannot be loaded ({why}): see Makefile and .ci/run")


@pytest.fixture
def mooncake(library: None, tmp_path: Path) -> Iterator[Callable[..., Mooncake]]:
    """`mooncake(size, **flags)`: servers, of which the master has these flags."""
    with ExitStack() as owned:
        try:
            owned.enter_context(own_network())
        except NoNetwork as error:
            impossible(str(error))
        yield lambda *of, **flags: owned.enter_context(Mooncake(tmp_path, *of, **flags))


@pytest.fixture
def opened() -> Iterator[Callable[[Mooncake], Stores]]:
    """`opened(mooncake)`: the store as daemons have it, but for the pause after a failure."""
    with ExitStack() as owned:

        def make(servers: Mooncake) -> Stores:
            environ = servers.environ
            worker = Worker(
                "mooncake",
                lambda: MooncakeStore(read_config(environ), environ, pause=PAUSE_S),
                5.0,
            )
            owned.callback(worker.close)
            worker.opened()
            return Stores([worker])

        yield make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
