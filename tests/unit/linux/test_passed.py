from __future__ import annotations

import os
import subprocess
import sys

import pytest

from preloadd.linux.passed import inherited

PID = 4711
GOOD = {"LISTEN_PID": str(PID), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a"}


@pytest.mark.parametrize(
    "changes",
    [
        {"LISTEN_PID": "4712"},
        {"LISTEN_PID": "me"},
        {"LISTEN_PID": ""},
        {"LISTEN_FDS": "0"},
        {"LISTEN_FDS": "-1"},
        {"LISTEN_FDS": "many"},
        {"LISTEN_FDS": "1000000000"},
        {"LISTEN_FDNAMES": "a:b"},
    ],
)
def test_what_was_not_passed_properly_is_not_inherited(changes: dict[str, str]) -> None:
    assert inherited(GOOD | changes, PID) == {}


def test_nothing_is_inherited_without_a_manager() -> None:
    assert inherited({}, PID) == {}


@pytest.mark.parametrize(
    ("names", "expected"),
    [("a:b:a", {"a": 2, "b": 1}), (None, {"unknown": 3}), (":x:", {"": 2, "x": 1})],
)
def test_inherited_descriptors_come_by_name_and_private(
    names: str | None, expected: dict[str, int]
) -> None:
    source = "import json, os; from preloadd.linux.passed import inherited; "
    source += "os.environ['LISTEN_PID'] = str(os.getpid()); "
    source += "found = inherited(os.environ, os.getpid()); "
    source += "assert not any(os.get_inheritable(f.fileno()) for v in found.values() for f in v); "
    source += "print(json.dumps({k: len(v) for k, v in found.items()}))"
    # The shell gives the numbers; a manager would.
    shell = ["sh", "-c", 'exec "$0" -c "$1" 3</dev/null 4</dev/null 5</dev/null']
    environ = os.environ | {"LISTEN_FDS": "3"}
    if names is not None:
        environ["LISTEN_FDNAMES"] = names
    done = subprocess.run(
        [*shell, sys.executable, source], env=environ, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(expected).replace("'", '"'), done.stderr
