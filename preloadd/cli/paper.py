"""What people's output is written on: its width, its colours, and nothing harmful in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from preloadd.cli.words import harmless

UNBOUND = 10_000
"""Columns where nobody looks: every line is whole then, and can be searched."""


class Styled(NamedTuple):
    """Text, and the style it is to have."""

    text: str
    style: str


Cell = str | Styled


@dataclass(frozen=True, slots=True)
class Paper:
    """Columns, and whether there are colours. All that is written on it is made harmless first."""

    width: int = UNBOUND
    color: bool = False

    def table(
        self, heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, whole: Sequence[str] = ()
    ) -> str:
        """Rows below heads, if any is not empty. Columns `whole` are never folded."""
        # Here, because rich takes 50 ms that --help and -o json need not wait for.
        from preloadd.cli import layout

        parts = [[_part(cell) for cell in row] for row in rows]
        return layout.table(heads, parts, whole=whole, width=self.width, color=self.color)

    def lines(self, cells: Iterable[Cell]) -> str:
        """Each on a line of its own, folded between words."""
        from preloadd.cli import layout

        parts = map(_part, cells)
        return "".join(
            layout.line(text, style, width=self.width, color=self.color) for text, style in parts
        )


def _part(cell: Cell) -> tuple[str, str]:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return harmless(text), style
