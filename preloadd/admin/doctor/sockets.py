"""Where daemons listen and engines look: the same folder, safe, and short enough."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from preloadd.admin.doctor.configuration import Raw
from preloadd.admin.findings import Finding, fault, note, ok, warning
from preloadd.admin.world import World
from preloadd.linux.paths import socket_dirs

LONGEST = 107
"""Bytes of a socket's path, which the kernel keeps in 108 with a zero behind them."""


def examine(world: World, raw: Raw) -> Iterator[Finding]:
    """Look at the folder of sockets, and at what engines are told of it."""
    yield from _folder(Path(raw.socket_dir))
    yield from _lengths(raw)
    yield from _agreement(world, raw)


def _folder(path: Path) -> Iterator[Finding]:
    try:
        found = path.lstat()
    except OSError as error:
        yield note("sockets", f"{path}: {error.strerror}", "run `systemd-tmpfiles --create`")
        return
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        yield fault(
            "sockets", f"{path} is no folder, or a link to one", "set socket_dir to a folder"
        )
    elif mode & 0o022 and not mode & stat.S_ISVTX:
        yield fault(
            "sockets",
            f"{path} is writable for group or others (mode {mode:04o}), and refused by all",
            f"chmod go-w {path}",
        )
    else:
        yield ok("sockets", f"{path}, mode {mode:04o}, of user {found.st_uid}")


def _lengths(raw: Raw) -> Iterator[Finding]:
    for instance in raw.instances:
        name = "rank_draft.sock" if instance.endswith(".draft") else "rank.sock"
        length = len(os.fsencode(f"{raw.socket_dir}/{instance}/{name}"))
        if length > LONGEST:
            yield fault(
                "sockets",
                f"the path of {instance}'s socket has {length} bytes, of at most {LONGEST}",
                "set socket_dir to a shorter path",
            )


def _agreement(world: World, raw: Raw) -> Iterator[Finding]:
    """Whether an engine that is started from here, and searches as it does, finds the daemons."""
    searched = socket_dirs(world.environ, os.geteuid())
    told = world.environ.get("PRELOADD_SOCKET_DIR")
    if Path(raw.socket_dir) not in searched:
        yield warning(
            "sockets",
            f"daemons listen below {raw.socket_dir}, but engines started here look in "
            f"{', '.join(map(str, searched))}",
            f"set PRELOADD_SOCKET_DIR={raw.socket_dir} for engines, or correct socket_dir",
        )
    elif told and Path(told) != Path(raw.socket_dir):
        yield warning(
            "sockets",
            f"PRELOADD_SOCKET_DIR is {told} here, but daemons listen below {raw.socket_dir}",
            "unset it, or set it to the same folder: engines look there first",
        )
