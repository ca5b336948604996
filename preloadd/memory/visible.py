"""What others have chosen, such as the variables that hide GPUs, as part of a line of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from preloadd.domain.lines import one_line

MOST = 300
"""Characters of such a text that are told."""


def brief(text: object) -> str:
    """`text` on one line, cut where it gets long."""
    line = one_line(text)
    return line if len(line) <= MOST else f"{line[:MOST]}…"


def hint(name: str, environ: Mapping[str, str]) -> str:
    """A variable and its value; '' if it is not set."""
    return f"{name}={brief(environ[name])}" if name in environ else ""


def hints(names: Iterable[str], environ: Mapping[str, str]) -> str:
    """The same of several variables; '' if none is set."""
    return "; ".join(filter(None, (hint(name, environ) for name in names)))
