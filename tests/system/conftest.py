"""Machines with a real systemd, once with this machine's version and once with a newer one.

Where machines cannot be made, tests are skipped; under CI, which is told to provide for them, they
fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.checkpoints import llama
from tests.needs import impossible
from tests.system import installed, newer
from tests.system.host import Boot, Host
from tests.system.machine import NoMachine, Plan, booted

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "preloadd-tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.systemd)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=["own", "newer"])
def systemd(request: pytest.FixtureRequest) -> list[Path]:
    """The layers that make up a version of systemd."""
    try:
        return [newer.layer(CACHE)] if request.param == "newer" else []
    except newer.NotToBeHad as error:
        impossible(str(error))


@pytest.fixture(scope="session")
def boot(systemd: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Boot:
    """Boots machines on which preloadd is installed: `with boot(unit=…, prepare=…) as host`.

    A machine for one test costs half a second; tests that leave it as they found it may share one.
    """
    return partial(_boot, systemd, tmp_path_factory)


@pytest.fixture(scope="session")
def boot_once(tmp_path_factory: pytest.TempPathFactory) -> Boot:
    """The same with this machine's version alone, where the version makes no difference."""
    return partial(_boot, [], tmp_path_factory)


@contextmanager
def _boot(
    systemd: list[Path],
    folders: pytest.TempPathFactory,
    *,
    program: str = installed.STAND_IN,
    unit: str = "basic.target",
    prepare: str = ":",
    files: Mapping[str, str] = MappingProxyType({}),
    binds: Sequence[tuple[Path, str]] = (),
) -> Iterator[Host]:
    """`program` is what runs as preloadd: by default the stand-in. `files` are put there before."""
    package = installed.install(folders.mktemp("machine") / "package", program)
    for inside, text in files.items():
        path = package / inside.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    plan = Plan(
        layers=[*systemd, package],
        binds=[*installed.PYTHON_BINDS, *binds],
        prepare=f"{installed.PREPARE}; {prepare}",
        unit=unit,
    )
    try:
        with booted(plan) as machine:
            yield Host(machine)
    except NoMachine as error:
        impossible(str(error))


@pytest.fixture
def host(boot: Boot) -> Iterator[Host]:
    """A machine with the stand-in, and no group yet."""
    with boot() as host:
        yield host


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that loads in no time, readable for every user."""
    folder = tmp_path_factory.mktemp("models")
    model = llama(folder / "model")
    for path in (folder.parent, folder, model, *model.iterdir()):
        path.chmod(path.stat().st_mode | 0o755)
    return model
