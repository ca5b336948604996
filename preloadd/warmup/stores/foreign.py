"""Stores of other packages, which are found by their entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError
from preloadd.warmup.stores.api import GROUP, Open, Store


def installed() -> dict[str, EntryPoint]:
    """What is there, by name. Of one name the first counts, as for an import."""
    found: dict[str, EntryPoint] = {}
    for one in entry_points(group=GROUP):
        found.setdefault(one.name, one)
    return found


def open_foreign(found: EntryPoint, rest: str, environ: Mapping[str, str]) -> Store:
    """The store; ConfigError if its package cannot be loaded, or says that it cannot be used."""
    try:
        make: Open = found.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{found.value}, which is installed for it, cannot be loaded ({one_line(error)}): "
            "repair or remove that package"
        ) from error
    return make(rest, environ)
