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


def progress(phase: str, done: int, total: int, *, said: str = "") -> str:
    """How far a load is, `done` of `total` bytes in this phase: "storing 1.0 GiB of 2.0 GiB (50%)".

    What is not known ("" or 0) is left out, and so is a phase whose name was just `said`.
    """
    phase = "" if phase == said else phase
    if not total:
        return ", ".join(filter(None, [phase, size(done) if done else ""]))
    if phase and not done:
        # It may be over before anything else is told, and must not look as if it were not.
        return f"{phase} {size(total)}"
    return f"{phase} {size(done)} of {size(total)} ({percent(done, total)})".lstrip()
