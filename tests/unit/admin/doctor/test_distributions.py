import re
import tomllib
from pathlib import Path

import pytest

from preloadd.admin.doctor.distributions import NEEDED, _numbers, older

PROJECT = Path(__file__).parents[4] / "pyproject.toml"


def test_needs_are_those_of_the_project():
    written = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    assert dict(re.split(">=", need) for need in written) == NEEDED


@pytest.mark.parametrize(
    ("found", "least", "old"),
    [("2.9", "2.12", True), ("2.12.1", "2.12", False), ("3", "2.12", False), (None, "1", False)],
)
def test_versions_are_compared_by_number(found, least, old):
    assert older(found, least) is old


@pytest.mark.parametrize(
    ("text", "numbers"), [("1.2rc1", [1, 2]), ("2.11+cu130", [2, 11]), ("1!3.4", [3, 4]), ("x", [])]
)
def test_releases(text, numbers):
    assert _numbers(text) == numbers
