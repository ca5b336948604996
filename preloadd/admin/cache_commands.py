"""What `preloadd admin cache` can be told, and what is done then."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from preloadd.admin import bundles, cache_report, given
from preloadd.admin.cache import (
    Cache,
    caches_in,
    export,
    pick,
    prunable,
    prune,
    put,
    roots_of,
    sources,
    target_of,
)
from preloadd.admin.durations import seconds
from preloadd.admin.world import World
from preloadd.domain.lines import one_line
from preloadd.errors import EXIT_STATUS, ConfigError, ErrorCode, InsecurePath
from preloadd.warmup.merge import Existing

DAMAGED = EXIT_STATUS[ErrorCode.DAMAGED]


def list_caches(options: argparse.Namespace, world: World) -> int:
    """`cache list`: one configuration a line."""
    found = caches_in(roots_of(world.environ, options.root))
    return _tell(found, cache_report.as_list(found), options)


def show_cache(options: argparse.Namespace, world: World) -> int:
    """`cache show`: everything about one."""
    found = pick(roots_of(world.environ, options.root), options.hash)
    return _tell([found], cache_report.as_sheet(found), options)


def verify_caches(options: argparse.Namespace, world: World) -> int:
    """`cache verify`: 72 if an engine could end when it loads one of them."""
    roots = roots_of(world.environ, options.root)
    found = caches_in(roots) if options.hash is None else [pick(roots, options.hash)]
    _tell(found, cache_report.as_verdict(found), options)
    return DAMAGED if any(one.faults for one in found) else 0


def export_cache(options: argparse.Namespace, world: World) -> int:
    """`cache export`: the files that were written, one a line."""
    found = pick(roots_of(world.environ, options.root), options.hash)
    return _written(export(found, options.folder))


def import_caches(options: argparse.Namespace, world: World) -> int:
    """`cache import`: the files that were written, one a line."""
    roots = roots_of(world.environ, options.root, new=True)
    # All are judged, and placed, before one is written.
    todo = [(one, target_of(one, roots)) for one in sources(options.folder)]
    for one, root in todo:
        _written(put(one, root, options.existing))
    return 0


def prune_caches(options: argparse.Namespace, world: World) -> int:
    """`cache prune`: tells what would be removed; with --yes, what was."""
    if options.older_than is None and not options.hash:
        raise ConfigError(
            "say which tables are to go: --older-than TIME, --hash HASH, or both for those that "
            "are both"
        )
    before = None
    if options.older_than is not None:
        before = datetime.now(UTC).timestamp() - seconds(options.older_than, "--older-than")
    there = caches_in(roots_of(world.environ, options.root))
    found = prunable(there, before=before, only=options.hash, keep=options.keep)
    if not found:
        sys.stdout.write("nothing to do\n")
    elif options.yes:
        gone = prune(found)
        sys.stdout.writelines(f"removed {one_line(path)}\n" for path in gone)
        _require_gone(found, gone)
    else:
        sys.stdout.write(cache_report.as_list(found))
        sys.stdout.write("nothing was removed: --yes removes these\n")
    return 0


def _require_gone(caches: Sequence[Cache], gone: Collection[Path]) -> None:
    """InsecurePath that names what is still there, and is no file that could be removed."""
    tables = [one.path for cache in caches for one in cache.tables]
    left = [path for path in tables if path not in gone and path.is_dir()]
    if left:
        raise InsecurePath(
            "\n".join(
                f"{one_line(path)} is a folder, and stays: remove it by hand" for path in left
            )
        )


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add all of these to a parser, each with its function as `command`."""
    for name, command, arguments, text in _COMMANDS:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(command=command)
        added.add_argument(
            "--root",
            type=given.folder,
            metavar="DIR",
            help="the folder of configurations; default: where vLLM looks in this environment",
        )
        arguments(added)
    bundles.add_command(commands)


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="tell it as JSON")


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    _list_arguments(parser)
    parser.add_argument("hash", metavar="HASH", help="a configuration, or the first letters of it")


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    _list_arguments(parser)
    parser.add_argument("hash", metavar="HASH", nargs="?", help="default: all configurations")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hash", metavar="HASH", help="a configuration, or the first letters of it")
    parser.add_argument("folder", metavar="FOLDER", type=given.folder, help="made if there is none")


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=given.folder, help="what `export` wrote")
    how = parser.add_mutually_exclusive_group()
    parser.set_defaults(existing=Existing.KEEP)
    for existing, text in (
        (Existing.MERGE, "add to tables that are there; entries of the new ones win"),
        (Existing.REPLACE, "put the new ones in the place of those that are there"),
    ):
        how.add_argument(
            f"--{existing}", dest="existing", action="store_const", const=existing, help=text
        )


def _prune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older-than", metavar="TIME", help="not used for so long, such as 90d")
    for flag, text in (
        ("--hash", "only of this configuration; may be given several times"),
        ("--keep", "never of this configuration; may be given several times"),
    ):
        parser.add_argument(flag, metavar="HASH", action="append", default=[], help=text)
    parser.add_argument("--yes", action="store_true", help="remove them, not only tell which")


_COMMANDS = (
    ("list", list_caches, _list_arguments, "tell which configurations have tables here"),
    ("show", show_cache, _show_arguments, "tell all about the tables of one configuration"),
    ("verify", verify_caches, _verify_arguments, "look whether engines can load and will use them"),
    ("export", export_cache, _export_arguments, "copy one configuration to another folder"),
    ("import", import_caches, _import_arguments, "put tables where engines look for them"),
    ("prune", prune_caches, _prune_arguments, "remove unused tables; without --yes only tell them"),
)


def _tell(found: Sequence[Cache], text: str, options: argparse.Namespace) -> int:
    sys.stdout.write(cache_report.as_json(found) if options.json else text)
    return 0


def _written(paths: Sequence[Path]) -> int:
    sys.stdout.writelines(f"written {one_line(path)}\n" for path in paths)
    if not paths:
        sys.stdout.write("nothing to do: the same tables are there\n")
    return 0
