"""What is given on a command line."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def folder(text: str) -> Path:
    """A path; refused if it is empty, which would be the current folder without saying so."""
    if not text:
        raise ArgumentTypeError("it is empty: name a folder (`.` is the current one)")
    return Path(text)
