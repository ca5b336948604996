"""Machines with a real systemd, once with this machine's version and once with a newer one.

Where machines cannot be made, tests are skipped; under CI, which is told to provide for them, they
fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.checkpoints import llama
from tests.system import installed, newer
from tests.system.host import Host
from tests.system.machine import NoMachine, Plan, booted

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "preloadd-tests"
Boot = Callable[..., AbstractContextManager[Host]]


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
        return impossible(str(error))


@pytest.fixture(scope="session")
def boot(systemd: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Boot:
    """Boots machines on which preloadd is installed: `with boot(unit=…, prepare=…) as host`.

    A machine for one test costs half a second; tests that leave it as they found it may share one.

    `program` is what runs as preloadd: by default the stand-in. `files` are put there before.
    """

    @contextmanager
    def boot(
        *,
        program: str = installed.STAND_IN,
        unit: str = "basic.target",
        prepare: str = ":",
        files: dict[str, str] | None = None,
        binds: list[tuple[Path, str]] | None = None,
    ) -> Iterator[Host]:
        package = installed.install(tmp_path_factory.mktemp("machine") / "package", program)
        for inside, text in (files or {}).items():
            path = package / inside.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        plan = Plan(
            layers=[*systemd, package],
            binds=[*installed.PYTHON_BINDS, *(binds or [])],
            prepare=f"{installed.PREPARE}; {prepare}",
            unit=unit,
        )
        try:
            with booted(plan) as machine:
                yield Host(machine)
        except NoMachine as error:
            impossible(str(error))

    return boot


@pytest.fixture
def host(boot: Boot) -> Iterator[Host]:
    """A machine with the stand-in, and no group yet."""
    with boot() as host:
        yield host


@pytest.fixture
def real(boot: Boot, tmp_path: Path) -> Iterator[Host]:
    """A machine with preloadd itself and a tiny checkpoint at /srv/model, and no group yet."""
    model = llama(tmp_path / "model")
    for path in (tmp_path, model, *model.iterdir()):
        path.chmod(path.stat().st_mode | 0o755)
    with boot(program=installed.REAL, binds=[(model, "/srv/model")]) as host:
        yield host


def impossible(why: str) -> list[Path]:
    if os.environ.get("CI"):
        pytest.fail(f"machines are needed under CI: {why}", pytrace=False)
    pytest.skip(why)
