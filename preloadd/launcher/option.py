"""How an option of `preloadd run` is written, and where help shows it."""

from __future__ import annotations

import typer

from preloadd.domain.launch import flag

MODEL = "Model"
PARALLEL = "Parallelism"
NODES = "Parallelism over several nodes: the same on each but for the numbers that say which it is"
ENGINES = "Engines: where they find the weights, and who may have them"
WARMUP = "Warm-up: what ranks make ready besides weights, and share with those of other hosts"
HEALTH = "Health endpoint"
PROCESSES = "Processes"

NO_VALUE = " "
"""Shown where options have what they take; without it, switches are told to take a bool."""


def option(field: str, panel: str, metavar: str | None, text: str, *, short: str = "") -> object:
    """The option for `field` of RunOptions."""
    names = [flag(field), short] if short else [flag(field)]
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar or NO_VALUE)


# None means that a flag was not given: its default is that of RunOptions.
Text = str | None
Texts = list[str] | None
