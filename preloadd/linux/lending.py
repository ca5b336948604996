"""Lending this package to another interpreter, and nothing else that is installed beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def lend(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` in which any Python finds this preloadd first, through a link in `folder`.

    The folder is made if it is not there. OSError.
    """
    folder.mkdir(exist_ok=True)
    fresh = folder / f"{PACKAGE.name}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(PACKAGE)
    fresh.replace(folder / PACKAGE.name)
    paths = [str(folder), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}
