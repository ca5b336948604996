"""What shared stores cost, and who may write into them; that they can be used at all is for
`config check`."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from preloadd.admin.doctor.configuration import Raw
from preloadd.admin.findings import Finding, ok, warning
from preloadd.admin.world import World
from preloadd.config.engine import members_of
from preloadd.config.files import group_documents, group_files
from preloadd.errors import ConfigError
from preloadd.warmup.stores.file import KIND as FILE
from preloadd.warmup.stores.mooncake_config import STANDALONE, VARIABLE, read_config
from preloadd.warmup.stores.mooncake_store import KIND as MOONCAKE

SUBJECT = "stores"


def examine(world: World, raw: Raw) -> Iterator[Finding]:
    """Look at each store of any group once."""
    for name, ranks in _stores(world).items():
        kind, _, path = name.partition(":")
        if kind == MOONCAKE:
            yield from _mooncake(world, raw, ranks)
        elif kind == FILE and path.startswith("/"):
            yield from _file(Path(path))


def _stores(world: World) -> dict[str, int]:
    """Names of stores, each with how many daemons of this host use it."""
    found: dict[str, int] = {}
    for document in group_documents(group_files(world.config_dir).paths)[0]:
        warmup = document.table.get("warmup")
        names = warmup.get("stores") if isinstance(warmup, dict) else None
        for name in names if isinstance(names, list) else []:
            found[str(name)] = found.get(str(name), 0) + len(members_of(document))
    return found


def _mooncake(world: World, raw: Raw, ranks: int) -> Iterator[Finding]:
    environ = world.service_environ(raw.daemon_user)
    try:
        config = read_config(environ)
    except ConfigError:
        return
    if config.embedded:
        each, whole = config.global_segment_size, config.global_segment_size * ranks
        yield warning(
            SUBJECT,
            f"Mooncake's mode is embedded: each daemon lends {each:,} bytes of memory to the pool, "
            f"{whole:,} on this host, and takes along what lies there when it ends",
            f"run a mooncake_client with that memory, and set mode to {STANDALONE!r} and "
            f"global_segment_size to 0 in {environ[VARIABLE]}",
        )
    else:
        yield ok(SUBJECT, f"Mooncake at {config.master_server_address}: daemons lend no memory")


def _file(path: Path) -> Iterator[Finding]:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & 0o002:
        yield warning(
            SUBJECT,
            f"{path} is writable for everybody (mode {mode:04o}): of what lies there only files of "
            "root, its owner and the daemons' user are used, and anybody can fill it",
            f"chmod o-w {path}",
        )
    else:
        yield ok(SUBJECT, f"{path} can be written by its owner and, if at all, its group")
