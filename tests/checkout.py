"""Where the sources are."""

from __future__ import annotations

from pathlib import Path

import preloadd

ROOT = Path(preloadd.__file__).parents[1]
"""The folder that `preloadd` is imported from: what a process of the tests needs in PYTHONPATH."""
