"""What units say that no systemd is needed to see."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from preloadd.config.group import Restart

UNITS = Path(__file__).parents[3] / "systemd"


def settings(unit: str) -> dict[str, list[str]]:
    """The values of a unit by key."""
    text = (UNITS / unit).read_text().replace("\\\n", "")
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^([A-Z][A-Za-z]+)=(.*)$", text, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def test_a_rank_without_its_drop_in_is_limited_as_one_with_it() -> None:
    rank, default = settings("preloadd@.service"), Restart()
    assert rank["StartLimitIntervalSec"] == [f"{default.interval_s:g}"]
    assert rank["StartLimitBurst"] == [str(default.burst)]


def test_the_supervisor_tries_again_whatever_was_wrong() -> None:
    supervisor = settings("preloadd-supervisor.service")
    assert supervisor["Restart"] == ["always"]
    assert supervisor["StartLimitIntervalSec"] == ["0"]
    assert "RestartPreventExitStatus" not in supervisor


def test_the_supervisor_cannot_see_the_tokens() -> None:
    supervisor = settings("preloadd-supervisor.service")
    assert supervisor["InaccessiblePaths"] == ["-/var/lib/preloadd"]
    assert "StateDirectory" not in supervisor


@pytest.mark.parametrize(
    ("environ", "status", "told"),
    [
        ({}, 1, "preloadd-generator failed"),
        ({"PRELOADD_GENERATED": "1"}, 0, ""),
        ({"PRELOADD_GENERATED": "1", "PRELOADD_GROUPS": "a b"}, 1, "group b does not serve"),
        ({"PRELOADD_GENERATED": "1", "PRELOADD_GROUPS": "a"}, 0, ""),
        ({"PRELOADD_GENERATED": "1", "PRELOADD_REFUSED": "x.toml"}, 1, "x.toml is refused"),
    ],
)
def test_a_start_is_good_only_if_all_groups_are_known_and_serve(
    tmp_path: Path, environ: dict[str, str], status: int, told: str
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text('#!/bin/sh\ntest "$3" = preloadd-group@a.target\n')
    systemctl.chmod(0o755)
    (line,) = settings("preloadd-ready.service")["ExecStart"]
    command = shlex.split(line.replace("$$", "$").replace("$${", "${"))
    done = subprocess.run(command, env={"PATH": str(tmp_path), **environ}, stdout=-1, text=True)
    assert done.returncode == status
    assert told in done.stdout
    assert done.stdout.count("\n") == bool(told)
