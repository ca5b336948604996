"""What `preloadctl cache` can be told, and what is done then."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
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
    settled,
    sources,
    target_of,
)
from preloadd.admin.cache_errors import Several, telling, told
from preloadd.admin.durations import seconds
from preloadd.admin.world import World
from preloadd.domain.lines import one_line
from preloadd.errors import EXIT_STATUS, ConfigError, ErrorCode, PreloadError
from preloadd.warmup.merge import Existing

DAMAGED = EXIT_STATUS[ErrorCode.DAMAGED]
CLOSED = EXIT_STATUS[ErrorCode.DENIED]


def list_caches(options: argparse.Namespace, world: World) -> int:
    """`cache list`: one configuration a line."""
    found = caches_in(roots_of(world.environ, options.root))
    return _tell(found, cache_report.as_list(found), options)


def show_cache(options: argparse.Namespace, world: World) -> int:
    """`cache show`: everything about one."""
    found = pick(roots_of(world.environ, options.root), options.hash)
    return _tell([found], cache_report.as_sheet(found), options)


def verify_caches(options: argparse.Namespace, world: World) -> int:
    """`cache verify`: 72 if an engine could end when it loads one of them, else 77 if one
    was not looked at."""
    roots = roots_of(world.environ, options.root)
    found = caches_in(roots) if options.hash is None else [pick(roots, options.hash)]
    _tell(found, cache_report.as_verdict(found), options)
    if any(one.faults for one in found):
        return DAMAGED
    return CLOSED if any(one.hidden for one in found) else 0


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
        settled(one, root, options.existing)
    # What a full disk may stop halfway has been told by then.
    done = [_tell_written(put(one, root, options.existing)) for one, root in todo]
    return 0 if any(done) else _written([])


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
    if before is not None:
        unseen = [one.unseen for one in found if one.unseen is not None]
        sys.stdout.writelines(f"stays, since its age cannot be seen: {why}\n" for why in unseen)
        found = [one for one in found if one.unseen is None]
    if not found:
        sys.stdout.write("nothing to do\n")
    elif options.yes:
        _prune_all(found)
    else:
        sys.stdout.write(cache_report.as_list(found))
        sys.stdout.write("nothing was removed: --yes removes these\n")
    return 0


def _prune_all(caches: Sequence[Cache]) -> None:
    """Remove all that can be removed, and tell it; then Several, if some could not."""
    failed = []
    for one in caches:
        try:
            prune(one)
        except PreloadError as error:
            failed.append(error)
        except OSError as error:
            failed.append(told(error))
        gone = [table.path for table in one.tables if _is_gone(table.path)]
        sys.stdout.writelines(f"removed {one_line(path)}\n" for path in gone)
    if failed:
        raise Several(failed)


def _is_gone(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # who may not look into its folder has not removed it
    return False


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add all of these to a parser, each with its function as `command`."""
    for name, command, arguments, text in _COMMANDS:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(command=telling(command))
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
    if not _tell_written(paths):
        sys.stdout.write("nothing to do: the same tables are there\n")
    return 0


def _tell_written(paths: Sequence[Path]) -> bool:
    """Whether there are any."""
    sys.stdout.writelines(f"written {one_line(path)}\n" for path in paths)
    return bool(paths)
