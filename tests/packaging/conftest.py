"""Packages, built once, and machines with a Debian of their own to install them on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.demo.model import make_model
from tests.needs import impossible
from tests.packaging import builds, root
from tests.packaging.builds import Build
from tests.system import demo, installed
from tests.system.host import Host
from tests.system.machine import NoMachine, Plan, booted
from tests.system.newer import NotToBeHad

ENGINE = f"""#!/bin/sh
export PYTHONPATH=/usr/lib/preloadd
exec {root.ENGINE}/bin/python "$@"
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
            # The first of them waits for packages to be built, and for a Debian.
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def sdists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What builds download."""
    if missing := [tool for tool in builds.TOOLS if shutil.which(tool) is None]:
        impossible(f"packages cannot be built and looked at without {', '.join(missing)}")
    return builds.download(tmp_path_factory.mktemp("sdists"))


@pytest.fixture(scope="session")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources in another folder."""
    return builds.copy(tmp_path_factory.mktemp("copy") / "sources")


@pytest.fixture(scope="session")
def built(copied: Path, sdists: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The packages of this checkout."""
    assert copied.exists()  # made at the same time, so that nobody changes anything between the two
    return builds.build(builds.ROOT, tmp_path_factory.mktemp("built"), sdists)


@pytest.fixture(scope="session")
def newer(copied: Path, sdists: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The same of a later version."""
    folder = tmp_path_factory.mktemp("newer")
    sources = builds.newer(shutil.copytree(copied, folder / "sources"))
    later = {"SOURCE_DATE_EPOCH": str(builds.TIME + 3600)}
    return builds.build(sources, folder / "built", sdists, environ=later)


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Debian. It is big, and goes with the session."""
    folder = tmp_path_factory.mktemp("debian") / "root"
    try:
        yield root.make(folder)
    except NotToBeHad as error:
        impossible(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def host(
    debian: Path, built: Build, newer: Build, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    """A machine on which nothing of preloadd is, but packages and what engines need."""
    layer = root.layer(tmp_path_factory.mktemp("layer") / "engine")
    for path, text, mode in (
        ("usr/bin/preloadd-python", ENGINE, 0o755),
        ("usr/lib/sysusers.d/engine.conf", demo.ENGINES, 0o644),
    ):
        file = layer / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
    plan = Plan(
        root=debian,
        layers=[layer],
        binds=[
            *root.BINDS,
            (make_model(), demo.MODEL),
            (built.folder, "/opt/built"),
            (newer.folder, "/opt/newer"),
            (builds.ROOT / "bench", f"{installed.TESTS}/bench"),
            (builds.ROOT / "tests/system/inside", f"{installed.TESTS}/inside"),
        ],
        prepare="systemd-sysusers engine.conf",
        unit="multi-user.target",
    )
    try:
        with booted(plan) as machine:
            yield Host(machine)
    except NoMachine as error:
        impossible(str(error))
