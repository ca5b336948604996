"""What rich is used for: columns that fit, and colours. Imported only when a table is drawn."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

Part = tuple[str, str]
"""Text, and the style it is to have; '' for none."""


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Part]],
    *,
    whole: Sequence[str],
    width: int,
    color: bool,
) -> str:
    """Rows below heads, if any is not empty. Columns `whole` are never folded."""
    made = Table(box=None, pad_edge=False, show_header=any(heads), header_style="bold")
    for head in heads:
        made.add_column(head, overflow="fold", no_wrap=head in whole)
    for row in rows:
        made.add_row(*(Text(text, style) for text, style in row))
    return _laid_out(made, width=width, color=color)


def line(text: str, style: str, *, width: int, color: bool) -> str:
    """One line, folded between words."""
    return _laid_out(Text(text, style), width=width, color=color)


def _laid_out(what: Table | Text, *, width: int, color: bool) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
    )
    console.print(what)
    # rich fills every line with spaces.
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
