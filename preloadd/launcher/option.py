"""How an option of `preloadd run` is written, and where help shows it."""

from __future__ import annotations

import typer

from preloadd.domain.launch import flag

MODEL = "Model"
PARALLEL = "Parallelism"
NODES = "Parallelism over several nodes (the same on each but for its numbers)"
ENGINES = "Engines (where they find the weights, and who may have them)"
WARMUP = "Warm-up (what ranks make ready besides weights, and share)"
HEALTH = "Health endpoint"
PROCESSES = "Processes"


def option(field: str, panel: str, metavar: str | None, text: str, *, short: str = "") -> object:
    """The option for `field` of RunOptions."""
    names = [flag(field), short] if short else [flag(field)]
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


# None means that a flag was not given: its default is that of RunOptions.
Text = str | None
Texts = list[str] | None
