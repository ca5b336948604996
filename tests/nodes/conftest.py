"""Groups on several hosts, each of which is made of namespaces.

Where hosts cannot be made, tests are skipped; under CI, which is told to provide for them, they
fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.demo.model import make_model
from tests.checkpoints import MOE, llama
from tests.needs import impossible
from tests.nodes.cluster import Cluster
from tests.nodes.hosts import Network, NoHosts


@pytest.fixture
def cluster(socket_dir: Path, model: Path) -> Iterator[Callable[..., Cluster]]:
    """`cluster(count, limit=…)`: so many hosts for groups of `model`, which are gone afterwards."""
    with ExitStack() as owned:

        def make(count: int, **limits: float) -> Cluster:
            try:
                network = owned.enter_context(Network(count, socket_dir))
            except NoHosts as error:
                impossible(str(error))
            return Cluster(network, owned, model, limits)

        yield make


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint for any two ranks."""
    return llama(tmp_path / "model")


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A checkpoint with four experts in each layer."""
    return llama(tmp_path / "experts", config=MOE)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's folder."""
    return make_model()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
