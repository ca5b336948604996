"""Lending this package to another interpreter, and nothing else that is installed beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

LENT = "python"
"""The folder for it in that of a rank."""


def lend(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` in which any Python finds this preloadd first, through a link in `folder`.

    The folder is made if it is not there. OSError.
    """
    folder.mkdir(exist_ok=True)
    link, fresh = folder / PACKAGE.name, folder / f"{PACKAGE.name}.new"
    if not (link.is_symlink() and link.readlink() == PACKAGE):
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(PACKAGE)
        fresh.replace(link)
    paths = [str(folder), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


def take_back(folder: Path) -> None:
    """Remove what `lend` has made; OSError if there is none."""
    (folder / PACKAGE.name).unlink()
    folder.rmdir()
