"""What a test needs, and this machine may not have."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def impossible(why: str) -> NoReturn:
    """Skip the test for this reason; under CI, which is told to provide for it, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"this is needed under CI: {why}", pytrace=False)
    pytest.skip(why)
