"""What is configured, as far as doctor itself can read it, and the verdict of `config check`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from preloadd.admin.doctor.interpreter import run
from preloadd.admin.findings import Finding, fault, note, ok, warning
from preloadd.admin.world import World
from preloadd.config.engine import members_of
from preloadd.config.files import (
    Key,
    Layers,
    group_documents,
    group_files,
    host_files,
    read_all,
)
from preloadd.domain.ids import on_host
from preloadd.linux.room import room


@dataclass(frozen=True, slots=True)
class Raw:
    """The few settings that doctor needs itself, defaults where the files say nothing usable."""

    socket_dir: str = "/run/preloadd"
    state_dir: str = "/var/lib/preloadd"
    daemon_user: str = "preloadd"
    host: str = "127.0.0.1"
    port: int = 9470
    instances: tuple[str, ...] = ()


_KEYS = {
    "socket_dir": ("socket_dir",),
    "state_dir": ("state_dir",),
    "daemon_user": ("daemon_user",),
    "host": ("supervisor", "host"),
    "port": ("supervisor", "port"),
}


def read(world: World) -> Raw:
    """What can be read of the files; faults in them are told by `examine`."""
    layers = Layers()
    for document in read_all(host_files(world.config_dir).paths)[0]:
        layers.lay(str(document.path), document.table)
    environ, defaults = world.daemon_environ(), Raw()
    said = {name: _said(key, environ, layers) for name, key in _KEYS.items()}
    found: dict[str, Any] = {
        name: value
        for name, value in said.items()
        if value and type(value) is type(getattr(defaults, name))
    }
    return Raw(**found, instances=tuple(_instances(world)))


def examine(world: World, *, interpreter_works: bool) -> Iterator[Finding]:
    """The verdict of `config check`, by the daemons' interpreter, and whether the models fit."""
    if not interpreter_works:
        yield note("configuration", "not checked: see the interpreter above")
        return
    command = [world.python(), "-m", "preloadd.admin", "config", "check", "--json"]
    said, why = run(command, world.environ)
    try:
        told = json.loads(said)
        faults, notes, models = told["faults"], told["notes"], told["models"]
    except (ValueError, KeyError, TypeError):
        yield fault(
            "configuration", f"could not be checked: {why}", "run `preloadctl config check`"
        )
        return
    for one in faults:
        place = f"{one['origin']}: {one['key']}" if one["key"] else one["origin"]
        what, remedy = _parted(one["text"])
        yield fault("configuration", f"{place}: {what}", remedy)
    for text in notes:
        yield note("configuration", text)
    if not faults:
        yield ok("configuration", f"{world.config_dir} is valid: {len(models)} groups")
    if not models and not faults:
        yield note(
            "configuration", "no group is configured", f"add one to {world.config_dir}/groups.d"
        )
    yield from _memory(models, world)


def _memory(models: list[dict[str, Any]], world: World) -> Iterator[Finding]:
    """Whether what is not resident yet will fit in the host's memory, if it is to lie there.

    Weights of running ranks are in use already; those for GPUs are the loaders' to measure.
    """
    running = {path.parent.name for path, _ in world.running()}
    waiting = [
        model
        for model in models
        if on_host(model["instances"][0]) and not running & set(model["instances"])
    ]
    wanted = sum(model["nbytes"] for model in waiting)
    if not waiting:
        return
    free, limit = room(world.root)
    names = ", ".join(model["group"] for model in waiting)
    text = f"{names} need {wanted:,} bytes; {limit} leaves {free:,}"
    if wanted > free:
        yield warning("memory", text, "free memory, raise the limit, or configure smaller models")
    else:
        yield ok("memory", text)


def _said(key: Key, environ: Mapping[str, str], layers: Layers) -> object:
    """What environment or files say of `key`, as daemons take it; see `config.host`."""
    if text := environ.get("PRELOADD_" + "_".join(key).upper()):
        return int(text) if text.isdecimal() else text
    value: object = layers.values
    for name in key:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _instances(world: World) -> Iterator[str]:
    for document in group_documents(group_files(world.config_dir).paths)[0]:
        yield from members_of(document)


def _parted(text: str) -> tuple[str, str]:
    """What is wrong and, as far as it stands in brackets at the end, the remedy."""
    what, bracket, remedy = text.rpartition(" (")
    if bracket and remedy.endswith(")"):
        return what, remedy[:-1]
    return text, "correct the file"
