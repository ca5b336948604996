"""Man pages and completion say what `--help` says."""

import subprocess
import sys

import pytest

from preloadd.cli.exits import MEANINGS, Exit
from tests.checkout import ROOT

COMMON = ROOT / "packaging" / "common"


def test_documents_are_up_to_date():
    done = subprocess.run(
        [sys.executable, COMMON / "documents.py", "--check"], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 0


def complete(*words):
    script = """
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($#-1))
        _preloadctl
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script, "bash", COMMON / "preloadctl.bash", "preloadctl", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sta"], ["status", "start"]),
        (["group", "re"], ["restart"]),
        (["restart", "--rol"], ["--rolling"]),
        (["status", "-o", "j"], ["json"]),
        (["group", "restart", "--no"], ["--no-wait"]),
        (["status", "--timeout"], []),
    ],
)
def test_completion(words, expected):
    assert complete(*words) == expected


def test_every_exit_status_has_a_meaning():
    assert set(MEANINGS) == set(Exit)
    page = (COMMON / "preloadctl.1").read_text()
    assert all(f".B {int(status)}\n" in page for status in Exit)


def test_operators_are_told_every_exit_status():
    rows = (ROOT / "docs/operators/preloadctl.md").read_text()
    assert [status for status in Exit if f"| {int(status)} |" not in rows] == []
