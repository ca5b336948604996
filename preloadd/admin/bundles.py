"""`preloadd admin cache bundles`: which compile caches were packed or installed here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from preloadd.admin import given
from preloadd.admin.cache_report import moment
from preloadd.admin.world import World
from preloadd.domain.amounts import size
from preloadd.domain.lines import one_line
from preloadd.warmup.bundles.index import Entry, entries, listing
from preloadd.warmup.bundles.usage import Listing
from preloadd.warmup.names import versions_root

_HEADS = ("BUNDLE", "FROM", "FILES", "SIZE", "SINCE", "STATE")
_TEXT = "tell which compiled bundles were packed or installed here"


def list_bundles(options: argparse.Namespace, world: World) -> int:
    """`cache bundles`: one a line, the last one first."""
    root = options.root or versions_root(world.environ).parent
    known, there = entries(root), listing(root)
    sys.stdout.write(_json(root, known, there) if options.json else _table(root, known, there))
    return 0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to a parser, with its function as `command`."""
    added = commands.add_parser(
        "bundles", help=_TEXT, description=f"{_TEXT[0].upper()}{_TEXT[1:]}."
    )
    added.set_defaults(command=list_bundles)
    added.add_argument(
        "--root",
        type=given.folder,
        metavar="DIR",
        help="vLLM's cache root; default: VLLM_CACHE_ROOT, else where vLLM has it",
    )
    added.add_argument("--json", action="store_true", help="tell it as JSON")


def _table(root: Path, known: Sequence[Entry], there: Listing) -> str:
    if not known:
        return "no bundles\n"
    rows = [_HEADS, *(_row(one, there) for one in known)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "".join(f"{line}\n" for line in (f"{one_line(root)}:", *lines))


def _row(one: Entry, there: Listing) -> tuple[str, ...]:
    origin = "this host" if one.made else "a source"
    state = "there" if _is_there(one, there) else "removed"
    return one.sha256[:12], origin, str(one.files), size(one.nbytes), moment(one.at), state


def _json(root: Path, known: Sequence[Entry], there: Listing) -> str:
    bundles = [
        {
            "sha256": one.sha256,
            "made": one.made,
            "files": one.files,
            "nbytes": one.nbytes,
            "at": moment(one.at),
            "folders": list(one.folders),
            "there": _is_there(one, there),
        }
        for one in known
    ]
    return json.dumps({"root": str(root), "bundles": bundles}, indent=2) + "\n"


def _is_there(one: Entry, there: Listing) -> bool:
    return there.keys() >= set(one.folders)
