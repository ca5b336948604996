"""Amounts for people."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def percent(done: int, total: int) -> str:
    """How much is done, never 100 % before it is; empty where the total is not known."""
    return f"{100 * done // total}%" if total else ""
