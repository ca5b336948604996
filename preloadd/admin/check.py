"""Whether the configuration can work on this machine: what `config check` sees besides files."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from preloadd.admin import devices, stores
from preloadd.admin.readable import closed
from preloadd.admin.seeding import seeding, seeding_here
from preloadd.admin.service import Service, service
from preloadd.admin.world import World
from preloadd.config.engine import draft_key, fault_in
from preloadd.config.files import HOST_FILE, Document, Fault
from preloadd.config.group import Group
from preloadd.config.host import ENVIRONMENT, HostSettings, Survey, variable
from preloadd.config.strict import fields_of
from preloadd.config.tokens import VARIABLE
from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, PreloadError, ServiceManagerError
from preloadd.linux import peers, seqpacket
from preloadd.linux.systemctl import Systemctl
from preloadd.weights.checkpoint import locate, open_checkpoint
from preloadd.weights.native import require_divisible
from preloadd.weights.vllm import require_heads

TEMPLATE = "preloadd@CPU-0.service"
"""Any rank's unit: all are made of one template."""

VARIABLES = ("PRELOADD_CONFIG_DIR", "PRELOADD_PYTHON", VARIABLE)
"""What the environment of daemons may say besides the keys of the host's file."""

_FIND_VLLM = """
import importlib.util, sys
sys.exit(None if importlib.util.find_spec("vllm") else "has no vLLM")
"""


@dataclass(frozen=True, slots=True)
class Model:
    """A group's model as it lies on the disk. `nbytes` are those of its weights' files, and of its
    draft's."""

    group: str
    folder: str
    nbytes: int
    instances: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All that is wrong, what could not be seen as it should be, and the models that are there."""

    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    models: tuple[Model, ...]


def check(found: Survey, world: World) -> Report:
    """Look at the files, and at what they name on this machine as far as they can be understood."""
    faults, notes = list(found.faults), list(_unknown_variables(world))
    host = found.host or HostSettings()
    trial = service(host.daemon_user, world.service_environ(host.daemon_user))
    if not trial.stands_in:
        faults += _closed_files(found, trial)
    if found.host is not None:
        faults += _host_faults(host, found)
        faults += _other_user(host, found, world)
    if trial.stands_in and os.geteuid() != 0:
        notes.append(
            f"what {host.daemon_user} can read and run was tried as another user: run this as root"
        )
    models, here = [], seeding_here(host, trial, world.root)
    for file in found.groups:
        if file.group is not None:
            model, wrong = _look_at(file.group, str(file.path), trial, world)
            models += [model] if model else []
            notes += _without_draft(file.group, file.document)
            unseeded, more = seeding(file.group, str(file.path), here)
            notes += more
            faults += [
                fault_in(file.document, fault.key, fault.text) for fault in (*wrong, *unseeded)
            ]
            faults += _socket_faults(host, file.group, found)
    return Report(tuple(faults), tuple(notes), tuple(models))


def _without_draft(group: Group, document: Document) -> Iterator[str]:
    """A note of a draft that stays out of memory though vLLM is told of one."""
    if (found := group.speculation) is None or group.drafted is not None:
        return
    key, why = "draft.enabled", "is false: engines load the draft from disk"
    if found.why_not_held:
        key, why = draft_key(group.engine_args, found, "method"), found.why_not_held
    yield f"{document.home(key)}: {key} {why}"


def _host_faults(host: HostSettings, found: Survey) -> Iterator[Fault]:
    try:
        owner = pwd.getpwnam(host.daemon_user).pw_uid
    except KeyError:
        owner = None
        yield _fault_of_host(
            found,
            "daemon_user",
            f"there is no user {host.daemon_user!r} on this host (run `systemd-sysusers`, or name "
            "another)",
        )
    trusted = {0} if owner is None else {0, owner}
    for key, path in (("socket_dir", host.socket_dir), ("state_dir", host.state_dir)):
        if why := _unfit(Path(path), trusted):
            yield _fault_of_host(found, key, why)


def _fault_of_host(found: Survey, key: str, text: str) -> Fault:
    """What is wrong with a key of the host, where it is said."""
    return Fault(found.layers.origin([key]) or str(found.folder / HOST_FILE), key, text)


def _closed_files(found: Survey, trial: Service) -> Iterator[Fault]:
    """Faults of files that this user can read, and the daemons' user cannot."""
    for fault in trial.closed_files(found.folder):
        if fault not in found.faults:
            yield Fault(fault.origin, fault.key, f"as user {trial.user}: {fault.text}")


def _other_user(host: HostSettings, found: Survey, world: World) -> Iterator[Fault]:
    """The fault of a user whom the units do not run daemons as, if there are units."""
    runs_as = ""
    with suppress(ServiceManagerError):
        told = Systemctl(world.environ).properties(TEMPLATE, ["LoadState", "User"])
        runs_as = told.get("User", "") if told.get("LoadState") == "loaded" else ""
    if runs_as and runs_as != host.daemon_user:
        yield _fault_of_host(
            found,
            "daemon_user",
            f"is {host.daemon_user!r}, but systemd runs daemons as {runs_as!r} (make it the same "
            "as User= of preloadd@.service, preloadd-gate@.service, preloadd-supervisor.service)",
        )


def _unknown_variables(world: World) -> Iterator[str]:
    """Notes of what looks like a setting in the environment of daemons, and is none."""
    known = [*VARIABLES, *(variable(key) for key, _ in fields_of(HostSettings))]
    bare = {name.removeprefix(ENVIRONMENT): name for name in known}
    for name in world.defaults_environ():
        if name.startswith(ENVIRONMENT) and name not in known:
            near = get_close_matches(name.removeprefix(ENVIRONMENT), bare, n=1)
            hint = f" (did you mean {bare[near[0]]}?)" if near else ""
            yield f"{world.defaults}: {name} is no variable of preloadd{hint}"


def _unfit(path: Path, trusted: set[int]) -> str:
    """Why daemons could not keep things in `path`; a folder that is not there yet can be made."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        if path.parent.is_dir():
            return ""
        return f"{path}: its parent is not there (create {path.parent}, or choose another folder)"
    except OSError as error:
        return f"{path}: {error.strerror} (run this as root)"
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is no folder, or a link to one (give the folder itself)"
    if found.st_uid not in trusted:
        return f"{path} belongs to user {found.st_uid} (give it to root or to daemon_user)"
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return f"{path} is writable for group or others, mode {mode:04o} (`chmod go-w {path}`)"
    return ""


def _look_at(
    group: Group, file: str, trial: Service, world: World
) -> tuple[Model | None, list[Fault]]:
    """The group's model, and what of the group does not work here."""
    faults = [Fault(file, key, f"{error}") for key, error in _access_faults(group)]
    python = group.python or world.python()
    if why := _useless(python, group, trial):
        faults.append(Fault(file, "python", why))
    else:
        faults += devices.faults(group, file, trial, python)
        faults += stores.faults(group, file, trial, world.python(), python)
    folders, nbytes = [], 0
    for where, name, revision in _checkpoints(group):
        found = _checkpoint(name, revision, trial)
        if isinstance(found, str):
            faults.append(Fault(file, where, found))
        else:
            folders.append(found[0])
            nbytes += found[1]
    if len(folders) < len(list(_checkpoints(group))):
        return None, faults
    if why := _indivisible(folders[0], group):
        faults.append(Fault(file, "parallel.tensor_parallel_size", f"{why} (change the sizes)"))
    instances = tuple(map(str, group.instances))
    return Model(group.name, str(folders[0]), nbytes, instances), faults


def _useless(python: str, group: Group, trial: Service) -> str:
    """Why the group's loaders cannot run with `python`; empty if they can."""
    if shutil.which(python) is None:
        return f"{python}: no executable file (install it, or name another)"
    if why := trial.cannot_load(python):
        # One that can at least start ours says itself what to do.
        ours = why.partition("preloadd-loader: ")[2]
        remedy = "install what is missing there, or name another"
        return ours or f"{python} cannot run a loader: {why} ({remedy})"
    if group.builder == "vllm" and (why := trial.fails([python, "-P", "-c", _FIND_VLLM])):
        return f"{python}: {why} (name the interpreter of the engine's environment)"
    return ""


def _checkpoints(group: Group) -> Iterator[tuple[str, str, str]]:
    """Key, name and revision of the model, and of a draft that ranks hold, if it has its own."""
    yield "model", group.model, group.revision
    if group.drafted is not None and group.drafted.model:
        said = draft_key(group.engine_args, group.drafted, "model")
        where = "draft.model" if group.draft.model else said
        yield where, group.drafted.model, group.drafted.revision


def _checkpoint(name: str, revision: str, trial: Service) -> tuple[Path, int] | str:
    """Where the model lies and how many bytes its weights' files have, or why it is no use: all is
    opened that ranks open before they read weights."""
    try:
        folder = locate(name, revision, environ=trial.environ)
        with trial.acting():
            if why := closed(folder):
                who = "this user" if trial.stands_in else trial.user
                return f"{who} cannot read it: {one_line(why)} (open it: chmod, chown or setfacl)"
            return folder, sum(file.size for file in open_checkpoint(folder).identities())
    except PreloadError as error:
        return one_line(error)


def _indivisible(folder: Path, group: Group) -> str:
    """Why the ranks of a group cannot hold the checkpoint between them; empty if they can, or if
    it cannot be read, of which ranks complain."""
    parallel = group.parallel.parallel
    try:
        if group.builder == "native":
            require_divisible(folder, parallel)
        else:
            require_heads(folder, parallel.tensor, group.arguments)
    except PreloadError as error:
        return str(error)
    return ""


def _access_faults(group: Group) -> Iterator[tuple[str, ConfigError]]:
    for key, look_up, names in (
        ("access.groups", peers.group_id, group.access.groups),
        ("access.users", peers.user_id, group.access.users),
    ):
        for name in names:
            try:
                look_up(name)
            except ConfigError as error:
                yield key, error


def _socket_faults(host: HostSettings, group: Group, found: Survey) -> Iterator[Fault]:
    for instance in group.instances:
        try:
            seqpacket.check_length(Path(host.socket_dir, str(instance), instance.socket_name))
        except PreloadError as error:
            yield _fault_of_host(found, "socket_dir", str(error))
            return
