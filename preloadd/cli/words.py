"""Numbers and foreign text for people."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def percent(done: int, total: int) -> str:
    """How much is done; never 100 % before it is."""
    return f"{100 * done // total}%" if total else ""


def duration(seconds: float) -> str:
    """A time in the two units that matter."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.2f} s" if whole < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def harmless(text: str) -> str:
    """`text` on one line, without what would move a terminal's cursor: others have written it."""
    joined = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in joined)
