"""Who owns what, and who may read or change it: configuration, state, tokens."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from preloadd.admin.doctor.configuration import Raw
from preloadd.admin.findings import Finding, fault, note, ok
from preloadd.admin.service import service
from preloadd.admin.world import World
from preloadd.config.files import group_documents, group_files, host_files

SECRETS = ("tokens.json", "seed.token")
GIVEN = ("token_file", "tls_key")
"""Keys of `[seed]` that name files with secrets. Their group may read those, for it to be the
daemons'."""


def examine(world: World, raw: Raw) -> Iterator[Finding]:
    """Look at every file and folder that daemons trust."""
    try:
        daemon = pwd.getpwnam(raw.daemon_user).pw_uid
    except KeyError:
        yield fault(
            "user",
            f"there is no user {raw.daemon_user!r}",
            "run `systemd-sysusers`, or set daemon_user to one that there is",
        )
        daemon = None
    trusted = {0} if daemon is None else {0, daemon}
    host, groups = host_files(world.config_dir), group_files(world.config_dir)
    config = [world.config_dir, *host.paths, *groups.paths]
    closed = () if daemon is None else _closed(world, raw.daemon_user)
    wrong = [*_config(config), *closed]
    yield from _all_well("permissions", config, wrong)
    yield from _state(Path(raw.state_dir), trusted, raw.daemon_user)
    yield from _given(groups.paths)


def _given(paths: list[Path]) -> Iterator[Finding]:
    """What is wrong with the files of secrets that groups name. Whether daemons can read them is
    tried by `config check`."""
    for document in group_documents(paths)[0]:
        seed = document.table.get("seed")
        table = seed if isinstance(seed, dict) else {}
        for key in GIVEN:
            if not isinstance(named := table.get(key), str) or not named:
                continue
            try:
                mode = stat.S_IMODE(Path(named).stat().st_mode)
            except OSError as error:
                remedy = "correct the path, or run this as root"
                yield note("permissions", f"{named} (seed.{key}): {error.strerror}", remedy)
                continue
            if mode & 0o007:
                yield fault(
                    "permissions",
                    f"{named} (seed.{key}) is open to all users (mode {mode:04o})",
                    f"chmod o-rwx {named}, and replace what is in it",
                )


def _all_well(subject: str, paths: list[Path], wrong: list[Finding]) -> Iterator[Finding]:
    if wrong:
        yield from wrong
    else:
        yield ok(subject, f"{paths[0]} and what is in it belong to whom they should")


def _config(paths: list[Path]) -> Iterator[Finding]:
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            remedy = "create it" if isinstance(error, FileNotFoundError) else "run this as root"
            yield fault("permissions", f"{path}: {error.strerror}", remedy)
            continue
        yield from _writable("permissions", path, found)
        if found.st_uid not in {0, os.geteuid()}:
            yield fault(
                "permissions",
                f"{path} belongs to user {found.st_uid}, who decides what daemons load",
                f"chown root {path}",
            )


def _closed(world: World, user: str) -> Iterator[Finding]:
    """What daemons cannot read, tried as their user."""
    trial = service(user, world.environ)
    if trial.stands_in:
        yield note("permissions", f"whether {user} can read it was not tried", "run this as root")
        return
    for one in trial.closed_files(world.config_dir):
        what = one.text.partition(" (")[0]
        yield fault(
            "permissions",
            f"{one.origin} cannot be read by daemons: {what}",
            f"chmod a+rX {one.origin}",
        )


def _state(folder: Path, trusted: set[int], user: str) -> Iterator[Finding]:
    try:
        found = folder.stat()
    except FileNotFoundError:
        yield note("state", f"{folder} is not there yet: the first daemon makes it")
    except OSError as error:
        yield note("state", f"{folder}: {error.strerror}", "run this as root")
    else:
        wrong = [*_writable("state", folder, found)]
        if found.st_uid not in trusted:
            text = f"{folder} belongs to user {found.st_uid}"
            wrong.append(fault("state", text, f"chown {user}: {folder}"))
        yield from _all_well("state", [folder], [*wrong, *_secrets(folder)])


def _secrets(folder: Path) -> Iterator[Finding]:
    for name in SECRETS:
        path = folder / name
        try:
            mode = stat.S_IMODE(path.lstat().st_mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield note("state", f"{path}: {error.strerror}", "run this as root")
            continue
        if mode & 0o077:
            yield fault(
                "state",
                f"{path} is open to group or others (mode {mode:04o})",
                f"chmod 600 {path}, then `preloadctl token rotate` for each token",
            )


def _writable(subject: str, path: Path, found: os.stat_result) -> Iterator[Finding]:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        yield fault(
            subject,
            f"{path} is writable for group or others (mode {mode:04o})",
            f"chmod go-w {path}",
        )
