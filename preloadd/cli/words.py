"""Times and foreign text for people."""

from __future__ import annotations


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
