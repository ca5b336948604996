"""Tables of plain text, and times in them, as people and machines read them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row, of which all have as many cells; the first are the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def columns() -> int | None:
    """How wide the terminal is that standard output goes to; None if it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def many(what: str, count: int) -> str:
    """So many of what a word with a regular plural means."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def moment(seconds: float) -> str:
    """A wall time, seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
