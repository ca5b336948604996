"""A real program called systemctl answers, first thing on the path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from preloadd.errors import ServiceManagerError
from preloadd.linux.systemctl import Systemctl
from preloadd.supervisor.units import ServiceManager
from preloadd.supervisor.verdict import Unit

NAMES = ["preloadd@CPU-0.service", "preloadd@CPU-1.service"]
SHOWN = """\
Id=preloadd@CPU-0.service
LoadState=loaded
ActiveState=failed
SubState=failed
Result=start-limit-hit
NRestarts=4
StatusText=failed: no model

Id=preloadd@CPU-1.service
LoadState=not-found
ActiveState=inactive
"""


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def made(script: str) -> ServiceManager:
        program = tmp_path / "systemctl"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return ServiceManager(Systemctl(os.environ, timeout=5.0))

    return made


def test_loaded_units_are_told(manager):
    told = manager(f"cat <<'END'\n{SHOWN}END")(NAMES)
    assert told == {
        NAMES[0]: Unit(NAMES[0], "failed", "failed", "start-limit-hit", "failed: no model", 4)
    }


def test_what_a_service_wrote_is_printable(manager):
    shown = SHOWN.replace("no model", "no\x1b[2J model")
    assert manager(f"cat <<'END'\n{shown}END")(NAMES)[NAMES[0]].status == r"failed: no\x1b[2J model"


def test_a_manager_that_fails_is_an_error_and_not_one_without_services(manager):
    with pytest.raises(ServiceManagerError, match="Connection timed out"):
        manager("echo 'Connection timed out' >&2; exit 1")(NAMES)


def test_no_manager_is_nothing_to_complain_of(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ServiceManager(Systemctl(os.environ))(NAMES) == {}
