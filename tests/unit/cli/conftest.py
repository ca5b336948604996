"""Ranks and a systemd for commands, and the commands themselves."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from preloadd.cli.app import run
from preloadd.cli.world import World
from tests.rank_stand_in import Ranks
from tests.systemctl_stand_in import SystemctlStandIn


@pytest.fixture
def ranks(socket_dir: Path) -> Iterator[Ranks]:
    ranks = Ranks(socket_dir)
    yield ranks
    ranks.close()


@pytest.fixture
def systemd(tmp_path: Path) -> SystemctlStandIn:
    """A systemd that knows no unit."""
    home = tmp_path / "bin"
    home.mkdir()
    return SystemctlStandIn(home)


@pytest.fixture
def managed(systemd: SystemctlStandIn) -> Callable[..., None]:
    """Makes systemd know a group: `managed("smol", "CPU-0", "CPU-1", active=…)`."""

    def make(
        name: str, *instances: str, active: str = "active", sub: str = "running", **more: object
    ) -> None:
        units = [f"preloadd@{instance}.service" for instance in instances]
        target = f"preloadd-group@{name}.target"
        systemd.unit(target, active, "active", Requires=" ".join(reversed(units)))
        systemd.unit("preloadd.target", "active", "active", Wants=target)
        pid = os.getpid() if active == "active" else 0
        for number, unit in enumerate(units):
            environment = f"PRELOADD_GROUP={name} PRELOADD_RANK={number}"
            told = {"MainPID": pid, "Environment": environment, **more}
            systemd.unit(unit, active, sub, **told)

    return make


class Ran(NamedTuple):
    """How a command ended, and what it wrote."""

    status: int
    out: str
    err: str


Ctl = Callable[..., Ran]


@pytest.fixture
def ctl(socket_dir: Path, systemd: SystemctlStandIn, capsys: pytest.CaptureFixture[str]) -> Ctl:
    """Runs a command in this process, on the ranks and the systemd of this test."""

    def ctl(*arguments: str) -> Ran:
        environ = {**systemd.environ, "PRELOADD_SOCKET_DIR": str(socket_dir)}
        # Where no supervisor listens, whatever runs on this host.
        environ |= {"PRELOADD_SUPERVISOR_PORT": "1"}
        environ |= {"XDG_RUNTIME_DIR": str(systemd.home), "TMPDIR": str(systemd.home)}
        world = World(environ, os.geteuid(), io.StringIO(), io.StringIO())
        status = run(arguments, world)
        parsed = capsys.readouterr()
        assert isinstance(world.out, io.StringIO)
        assert isinstance(world.err, io.StringIO)
        return Ran(status, world.out.getvalue() + parsed.out, world.err.getvalue() + parsed.err)

    return ctl
