"""Help of `preloadd run`: its options in sections, and each of them whole however wide it is."""

from __future__ import annotations

from typing import Any

import typer.core


class Sectioned(typer.core.TyperCommand):
    """A command whose options are told in the order of their panels, below the names of those."""

    # What click calls these types is not for others to import: typer brings its own of it.
    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write all of them."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (told := parameter.get_help_record(ctx)) is not None:
                panel = getattr(parameter, "rich_help_panel", None)
                sections.setdefault(panel or "Options", []).append(told)
        for title, options in sections.items():
            with formatter.section(title):
                formatter.write_dl(options)
