"""Ranks whose weights are in the memory of a real GPU, and engines that use it.

Without a CUDA device these tests are skipped, but `-m gpu`, which asks for them, is an error then.
Each is checked to leave no device memory behind; the tests' own process never makes a context, so
all memory in use is somebody's who is told of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.gpu.child import Child, prepare
from tests.gpu import device
from tests.gpu.inside import engine as inside
from tests.gpu.models import mixed
from tests.gpu.ranks import managing_gpu, python_path
from tests.manager import Manage, Manager, managing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    why = device.missing() if ours else ""
    if why and are_asked_for(config.option.markexpr) and not config.option.collectonly:
        raise pytest.UsageError(f"tests marked gpu need a CUDA device: {why}")
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.slow)
        if why:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device: {why}"))


def are_asked_for(marks: str) -> bool:
    """Whether an expression of marks selects these tests by name."""
    return "gpu" in marks.replace("not gpu", "")


@pytest.fixture(scope="session", autouse=True)
def _forked_from() -> Iterator[None]:
    """The process that children are forked from; all device memory is free again at the end."""
    prepare([inside.__name__])
    # What the driver takes for itself at the first context stays with it. What it keeps of others,
    # a little of each, it gives back when there is another one.
    _make_one_context()
    before = device.used()
    yield
    _make_one_context()
    assert device.back_at(before), f"{device.used() - before:,} bytes of device memory are left"


def _make_one_context() -> None:
    with Child() as one:
        one(inside.make_context)


@pytest.fixture(autouse=True)
def _leaves_no_device_memory(leaves_nothing_behind: None) -> Iterator[None]:
    """Fails a test after which more or less device memory is in use than before."""
    before = device.used()
    yield
    if not device.back_at(before):
        more = device.used() - before
        pytest.fail(f"the test changed the device memory in use by {more:+,} bytes", pytrace=False)


@pytest.fixture(scope="session")
def gpu() -> str:
    """The GPU of all tests that need just one: its UUID."""
    return device.meter().uuid


@pytest.fixture(scope="session")
def environ() -> dict[str, str]:
    """What daemons are started with."""
    return {**os.environ, "PYTHONPATH": python_path()}


@pytest.fixture
def rank_on(gpu: str) -> Iterator[Manage]:
    """`rank_on(model)` is a manager whose rank serves `model` on the GPU (unless `start=False`)."""
    with managing() as manage:
        yield managing_gpu(manage, gpu)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of every dtype, and a few to compute with."""
    return mixed(tmp_path_factory.mktemp("models") / "mixed")


@pytest.fixture(scope="module")
def shared(gpu: str, model: Path) -> Iterator[Manager]:
    """A rank that serves `model`, one for a whole module: for tests that leave it as it is."""
    with managing() as manage:
        yield managing_gpu(manage, gpu)(model)


@pytest.fixture
def fork() -> Iterator[Callable[..., Child]]:
    """Makes processes that may use the GPU."""
    with ExitStack() as owned:
        yield lambda **environ: owned.enter_context(Child(environ))


@pytest.fixture
def engine(fork: Callable[..., Child]) -> Child:
    """One of them."""
    return fork()
