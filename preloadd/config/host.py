"""Everything that is configured on this host: `preloadd.toml` with its drop-ins, and the groups.

The later wins: file, drop-ins in order of name, `PRELOADD_*` in the environment, command line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, get_origin

from pydantic import Field

from preloadd.config.endpoints import Endpoints
from preloadd.config.faults import understood, validated
from preloadd.config.files import (
    HOST_FILE,
    Document,
    Fault,
    Key,
    Layers,
    Table,
    folder_faults,
    group_documents,
    group_files,
    host_files,
    read_all,
)
from preloadd.config.group import Group, claims, judge
from preloadd.config.ports import port_faults
from preloadd.config.strict import (
    AbsolutePath,
    LogLevel,
    Seconds,
    Strict,
    Text,
    fields_of,
)
from preloadd.domain.settings import Deadlines
from preloadd.errors import ConfigError

ENVIRONMENT = "PRELOADD_"
COMMAND_LINE = "command line"

Port = Annotated[int, Field(ge=1, le=65535)]


class Supervisor(Strict):
    """`[supervisor]`: where health, metrics and the status page are served, read-only."""

    host: Text = "127.0.0.1"
    port: Port = 9470
    ask_timeout_s: Seconds = 2.0
    peers: Endpoints = ()


class Patience(Strict):
    """`[deadlines]`: see `domain.settings.Deadlines`."""

    speak_s: Seconds = 10.0
    send_s: Seconds = 10.0
    silence_s: Seconds = 300.0
    stop_s: Seconds = 10.0
    profiling_s: Seconds = 300.0
    rendezvous_s: Seconds = 600.0
    peer_silence_s: Seconds = 15.0

    @property
    def deadlines(self) -> Deadlines:
        """The deadlines as a value."""
        return Deadlines(
            speak=self.speak_s,
            send=self.send_s,
            silence=self.silence_s,
            stop=self.stop_s,
            profiling=self.profiling_s,
            rendezvous=self.rendezvous_s,
            peer_silence=self.peer_silence_s,
        )


class HostSettings(Strict):
    """What `preloadd.toml` may say."""

    socket_dir: AbsolutePath = "/run/preloadd"
    state_dir: AbsolutePath = "/var/lib/preloadd"
    daemon_user: Text = "preloadd"
    log_level: LogLevel = "info"
    supervisor: Supervisor = Supervisor()
    deadlines: Patience = Patience()


class HostConfig(HostSettings):
    """The settings of this host, and its groups in the order of their files."""

    groups: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupFile:
    """One file in `groups.d` with its drop-ins; `group` is None if something is wrong with it."""

    document: Document
    group: Group | None

    @property
    def path(self) -> Path:
        """The file itself."""
        return self.document.path

    @property
    def origins(self) -> Collection[str]:
        """The file and its drop-ins."""
        return [str(path) for path, _ in self.document.parts]


@dataclass(frozen=True, slots=True)
class Survey:
    """All that was found, right or wrong. `host` is None if something is wrong with it."""

    folder: Path
    layers: Layers
    host: HostSettings | None
    groups: tuple[GroupFile, ...]
    host_faults: tuple[Fault, ...]
    group_faults: tuple[Fault, ...]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Every fault, those of the host first."""
        return self.host_faults + self.group_faults

    @property
    def config(self) -> HostConfig:
        """The whole, which has no faults; ConfigError tells them all."""
        if self.host is None or self.faults:
            raise ConfigError("\n".join(map(str, self.faults)))
        return combined(self.host, tuple(found.group for found in self.groups if found.group))


def load(
    folder: Path, environ: Mapping[str, str], overrides: Mapping[Key, object] | None = None
) -> HostConfig:
    """What is configured below `folder`; ConfigError with one line for every fault of every file.

    `overrides` are what a command line said.
    """
    return survey(folder, environ, overrides).config


def survey(
    folder: Path,
    environ: Mapping[str, str],
    overrides: Mapping[Key, object] | None = None,
    *,
    edits: Mapping[Path, bytes] | None = None,
) -> Survey:
    """Look at all the files, and go on where one is wrong.

    `edits` are what files of groups will hold, in the place of what they hold now.
    """
    files = host_files(folder)
    documents, unread = read_all(files.paths)
    layers = Layers()
    for document in documents:
        layers.lay(str(document.path), document.table)
    for key, value in environment(environ):
        layers.lay(variable(key), nested(key, value))
    for key, value in (overrides or {}).items():
        layers.lay(COMMAND_LINE, nested(key, value))
    host, wrong = validated(HostSettings, layers, str(folder / HOST_FILE))
    said = layers.origins.get(("supervisor", "port"))
    own = f"supervisor.port of {said}" if said else "supervisor.port"
    supervisor, unknown = understood(Supervisor, layers.values.get("supervisor", {}))
    ports = {} if "port" in unknown else {own: supervisor.port}
    groups, group_faults = _groups(folder, edits or {}, ports)
    host_faults = (*folder_faults(folder), *files.faults, *unread, *wrong)
    return Survey(
        folder, layers, None if host_faults else host, groups, host_faults, tuple(group_faults)
    )


def require_host(found: Survey) -> HostSettings:
    """The settings of the host, whatever is wrong with groups; ConfigError."""
    if found.host is None:
        raise ConfigError("\n".join(map(str, found.host_faults)))
    return found.host


def combined(host: HostSettings, groups: tuple[Group, ...]) -> HostConfig:
    """`host` with its `groups`."""
    mine = {name: getattr(host, name) for name in HostSettings.model_fields}
    return HostConfig(**mine, groups=groups)


def variable(key: Key) -> str:
    """The name of the environment variable that stands over `key`."""
    return ENVIRONMENT + "_".join(key).upper()


def environment(environ: Mapping[str, str]) -> Iterator[tuple[Key, object]]:
    """What the environment says of the host's settings. An empty variable says nothing."""
    for key, info in fields_of(HostSettings):
        text = environ.get(variable(key), "")
        if text:
            typed = info.annotation in (int, float, bool) or get_origin(info.annotation) is tuple
            yield key, _value(text) if typed else text


def nested(key: Key, value: object) -> Table:
    """The table that has nothing but `value` at `key`."""
    for name in reversed(key):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _value(text: str) -> object:
    """`text` as TOML means it; what is none stays text, to be refused with its name."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _groups(
    folder: Path, edits: Mapping[Path, bytes], ports: Mapping[str, int]
) -> tuple[tuple[GroupFile, ...], list[Fault]]:
    """What the files of groups say, and all that is wrong. `ports` are the host's own."""
    files = group_files(folder)
    documents, unread = group_documents(files.paths, edits)
    found, faults = [], [*files.faults, *unread]
    for document in documents:
        group, wrong = judge(document, ports)
        found.append(GroupFile(document, group))
        faults += wrong
    faults += _contested(documents)
    faults += port_faults((file.document, file.group) for file in found if file.group)
    return tuple(found), sorted(faults, key=attrgetter("origin"))


def _contested(documents: list[Document]) -> Iterator[Fault]:
    """Names and devices that more than one file lays claim to."""
    names: dict[str, Document] = {}
    devices: dict[str, Document] = {}
    for document in documents:
        name, mine = claims(document)
        if (first := names.setdefault(name, document)) is not document:
            text = f"{name!r} is the group of {first.home('name')} (rename one of them)"
            yield document.fault("name", text)
        for device in dict.fromkeys(mine):
            if (first := devices.setdefault(device, document)) is not document:
                text = f"{device} is given to the group of {first.home('gpus')}"
                yield document.fault("gpus", f"{text} (remove it from one of them)")
