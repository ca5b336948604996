"""`preloadctl cache bundles`: which compile caches were packed or installed here."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from preloadd.admin import given
from preloadd.admin.cache import require_folder
from preloadd.admin.cache_errors import telling
from preloadd.admin.columns import aligned, moment
from preloadd.admin.environment import user_name
from preloadd.admin.world import World
from preloadd.domain.amounts import size
from preloadd.domain.lines import one_line
from preloadd.domain.strict_json import Malformed
from preloadd.errors import ErrorCode, InsecurePath, PreloadError
from preloadd.warmup.bundles.index import NAME, Entry, listing, read
from preloadd.warmup.bundles.manifest import BadBundle
from preloadd.warmup.bundles.usage import Listing
from preloadd.warmup.names import versions_root

_HEADS = ("BUNDLE", "FROM", "FILES", "SIZE", "SINCE", "STATE")
_TEXT = "tell which compiled bundles were packed or installed here"


class DamagedIndex(PreloadError):
    """What is known of bundles cannot be read; the text names the file."""

    code: ClassVar[ErrorCode] = ErrorCode.DAMAGED


def list_bundles(options: argparse.Namespace, world: World) -> int:
    """`cache bundles`: one a line, the last one first; DamagedIndex, InsecurePath."""
    if options.root is not None:
        require_folder(options.root)
    root = options.root or versions_root(world.environ).parent
    known, there = _known(root), listing(root)
    sys.stdout.write(_json(root, known, there) if options.json else _table(root, known, there))
    return 0


def _known(root: Path) -> Sequence[Entry]:
    path = root / NAME
    try:
        return read(root)
    except (Malformed, BadBundle) as error:
        raise DamagedIndex(
            f"{one_line(path)}: {error}: daemons pass over it, and write it anew with their next "
            "bundle: remove it"
        ) from None
    except InsecurePath:
        found = path.lstat()
        raise InsecurePath(
            f"{one_line(path)} ({stat.filemode(found.st_mode)}, of {user_name(found.st_uid)}) is "
            f"passed over: it has to be a file of {user_name(os.geteuid())} that nobody else can "
            f"read: run this as its owner, or remove it"
        ) from None


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to a parser, with its function as `command`."""
    added = commands.add_parser(
        "bundles", help=_TEXT, description=f"{_TEXT[0].upper()}{_TEXT[1:]}."
    )
    added.set_defaults(command=telling(list_bundles))
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
    lines = aligned([_HEADS, *(_row(one, there) for one in known)])
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
