"""Engines and daemons for tests with a real vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.daemon import Daemon, Group
from tests.engines.vllm import harness
from tests.engines.vllm.harness import Engine, Missing
from tests.engines.vllm.zoo import ARCHITECTURES, Zoo
from tests.needs import impossible


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter with vLLM. Where there is none, tests are skipped; under CI they fail."""
    try:
        python = harness.vllm_python()
    except Missing as missing:
        impossible(f"vLLM: {missing}")
    harness.prepare(python, ARCHITECTURES)
    return python


@pytest.fixture(scope="session")
def zoo() -> Iterator[Zoo]:
    """Makes tiny models, each once."""
    with Zoo() as made:
        yield made


@pytest.fixture
def engine(vllm_python: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts processes for engines, as `Engine` is called."""
    made: list[Engine] = []
    with ExitStack() as owned:

        def start(**more: str) -> Engine:
            log = tmp_path / f"engine-{len(made)}"
            made.append(owned.enter_context(Engine(vllm_python, log, **more)))
            return made[-1]

        yield start
        for one in made:
            print(f"--- engine {one.pid}\n{one.told}")


@pytest.fixture(scope="session")
def prepared(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A process for engines that one test after the other can use: it has imported vLLM."""
    with Engine(vllm_python, tmp_path_factory.mktemp("engine") / "log") as made:
        yield made


@pytest.fixture
def lasting(prepared: Engine, engine: Callable[..., Engine]) -> Iterator[Engine]:
    """The process that tests share, with no engine in it; one of its own if that one has ended."""
    one = prepared if prepared.running else engine()
    before = len(one.told)
    yield one
    print(f"--- engine {one.pid}\n{one.told[before:]}")
    if one.running:
        one.drop()


@pytest.fixture
def daemon(vllm_python: Path, socket_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """`daemon(model, *flags)`: a rank that will serve it. Each has a folder of its own."""
    made: list[Daemon] = []
    with ExitStack() as owned:

        def start(model: Path, *flags: str) -> Daemon:
            folder = _folder(socket_dir, len(made))
            made.append(harness.daemon(vllm_python, model, folder, *flags))
            owned.callback(made[-1].close)
            return made[-1]

        yield start
        _show(made)


@pytest.fixture
def group(vllm_python: Path, socket_dir: Path) -> Iterator[Callable[..., Group]]:
    """`group(model, *flags)`: ranks that will serve it together."""
    made: list[Group] = []
    with ExitStack() as owned:

        def start(model: Path, *flags: str) -> Group:
            folder = _folder(socket_dir, len(made))
            made.append(owned.enter_context(harness.group(vllm_python, model, folder, *flags)))
            return made[-1]

        yield start
        _show(made)


def _folder(parent: Path, number: int) -> Path:
    folder = parent / str(number)
    folder.mkdir(mode=0o700)
    return folder


def _show(groups: list[Group] | list[Daemon]) -> None:
    for one in groups:
        print(f"--- daemon\n{one.told}")
