"""What must hold before a group is started, each check with the flag that is to be changed."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from preloadd.config.run import RunOptions
from preloadd.domain.access import Policy
from preloadd.domain.ids import Instance
from preloadd.domain.leases import LEASE, PROFILING
from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, OutOfDescriptors, OutOfRoom, PreloadError
from preloadd.linux import paths, peers, seqpacket
from preloadd.linux.fds import OwnedFd, is_exhausted
from preloadd.linux.room import room
from preloadd.warmup.stores.opening import open_stores
from preloadd.weights.checkpoint import open_checkpoint

FILES = 16
"""Descriptors that the launcher needs for itself, among them those for starting a child."""

FILES_OF_RANK = 8
"""Descriptors that the launcher needs for each rank, without what the rank parks."""

SPARE = 16
"""Descriptors that nothing parked may take: starting a process takes six, and keeps two of them."""


def find_python(written: str) -> str:
    """The interpreter that the user wrote, as an absolute path; this one if nothing was written.

    A link stays one: through it, an interpreter knows its virtual environment. ConfigError, also
    for a path that ranks cannot be told.
    """
    if not written:
        return sys.executable
    try:
        found = shutil.which(Path(written).expanduser())
    except RuntimeError:  # `~` stands for the home of somebody who is not known here
        found = None
    if found is None:
        raise ConfigError(
            f"--python: {one_line(written)} is no executable file: give a Python interpreter"
        )
    path = Path(found).absolute()
    require_text("--python", path)
    return str(path)


def prepare_socket_dir(
    options: RunOptions, instances: Sequence[Instance], environ: Mapping[str, str]
) -> tuple[Path, bool]:
    """The folder of the sockets of `instances`, made and checked, and whether nobody chose it.

    ConfigError, which says whose choice was wrong, or InsecurePath.
    """
    chosen = options.weight_cache_socket_dir
    path = chosen or _derived_dir(environ)
    whose = "--weight-cache-socket-dir" if chosen else _derivation(path, environ)
    require_text(whose, path)
    _require_short(whose, path, instances)
    policy = peers.policy(options.access, os.geteuid())
    try:
        paths.prepare_socket_dir(
            path,
            derived=chosen is None,
            mode=_mode(policy),
            group=-1 if policy.group is None else policy.group,
        )
    except OSError as error:
        if is_exhausted(error):
            raise
        raise ConfigError(
            f"{whose}: {one_line(path)} cannot be used ({error.strerror}): "
            "give a folder whose parent is there, has room and may be written to by you"
        ) from error
    return path, chosen is None


def require_text(whose: str, path: Path) -> None:
    """ConfigError unless `path` is text, as which other processes are told it.

    `whose` is what the user would have to change.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{whose}: {one_line(path)} has bytes that are not UTF-8: give another path, or rename"
        ) from error


def require_room(model: Path, share: Fraction) -> None:
    """OutOfRoom if this host has not the memory for `share` of the model, which is to lie in it.

    Each rank looks again for its own part, but together they can want more than there is. A
    checkpoint that cannot be read is for the ranks to complain of.
    """
    try:
        wanted = int(open_checkpoint(model).nbytes * share)
    except PreloadError:
        return
    free, limit = room()
    if wanted > free:
        raise OutOfRoom(wanted=wanted, free=free, limit=limit)


def require_stores(options: RunOptions, environ: Mapping[str, str], python: str) -> None:
    """ConfigError unless all shared stores can be used as they are configured, which takes seconds.

    `python` is the loaders' interpreter, and `environ` has it find this package.
    """
    engines = "" if python == sys.executable else python
    try:
        open_stores(options.warmup_cache_stores, environ, python=engines).close()
    except ConfigError as error:
        faults = [f"--warmup-cache-stores: {line}" for line in str(error).splitlines()]
        raise ConfigError("\n".join(faults)) from error


def allow_many_files(ranks: int) -> None:
    """Raise this process's limit of open files as far as it may: all parked descriptors count.

    OutOfDescriptors if that is not enough for `ranks` even before they park anything.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = FILES + FILES_OF_RANK * ranks
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OutOfDescriptors(
            f"this process may have {hard} open files, but needs {wanted} at least (ranks: "
            f"{ranks}): raise the limit with `ulimit -n`, or with LimitNOFILE= in a systemd unit"
        )


def require_spare(name: str, received: Iterable[OwnedFd]) -> None:
    """OutOfDescriptors if to keep what was just `received` as `name` could keep a rank from being
    started, or weights from being kept: to these, engines leave half of all that there are.

    The kernel gives the lowest free number, so that a high one says how many are in use.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare, others = SPARE, ""
    if is_of_engines(name):
        spare, others = max(SPARE, soft // 2), "weights and for "
    if soft != resource.RLIM_INFINITY and any(fd.fileno() >= soft - spare for fd in received):
        raise OutOfDescriptors(
            f"{name} is not kept for a next life: of the {soft} files that the launcher may have "
            f"open, the last {spare} are for {others}starting ranks again: raise the limit with "
            "`ulimit -n`, or with LimitNOFILE= in a systemd unit"
        )


def is_of_engines(name: str) -> bool:
    """Whether what is parked as `name` came by an engine, which weights must not suffer from."""
    return name.startswith((LEASE, PROFILING))


def _derived_dir(environ: Mapping[str, str]) -> Path:
    """The first of the user's own that can be there; $XDG_RUNTIME_DIR may name what is not."""
    candidates = paths.derived_dirs(environ, os.geteuid())
    return next((path for path in candidates if path.parent.is_dir()), candidates[0])


def _derivation(path: Path, environ: Mapping[str, str]) -> str:
    """Where a folder comes from that nobody chose, with the way out."""
    variable = paths.origin(path, environ)
    return f"--weight-cache-socket-dir (not given, derived from {variable or 'the usual folder'})"


def _require_short(whose: str, path: Path, instances: Sequence[Instance]) -> None:
    """ConfigError if the path of any rank's socket would be too long for the kernel."""
    for instance in instances:
        try:
            seqpacket.check_length(path / str(instance) / instance.socket_name)
        except ConfigError as error:
            raise ConfigError(f"{whose}: {error}") from error


def _mode(policy: Policy) -> int | None:
    """The mode the folder needs; None leaves one that the user made as it is."""
    return policy.folder_mode if policy.uids or policy.gids else None
