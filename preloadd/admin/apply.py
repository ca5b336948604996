"""Putting an edited configuration into effect, and first what that would cost.

systemd is told of the groups; running daemons are not touched. They take up what changed when they
start the next time, so what they would then drop is said now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from preloadd.admin.check import Report, check
from preloadd.admin.expand import expanded
from preloadd.admin.world import World
from preloadd.config.changes import drops
from preloadd.config.files import Fault, group_files, read
from preloadd.config.host import HostConfig, Survey, survey
from preloadd.config.rank import rank_settings
from preloadd.config.versions import with_versions
from preloadd.domain.files import FileIdentity
from preloadd.domain.settings import RankSettings, Running
from preloadd.errors import ConfigError, InsecurePath, PreloadError
from preloadd.linux.private import replace_file
from preloadd.weights.checkpoint import identities_of, locate


@dataclass(frozen=True, slots=True)
class Drop:
    """A rank that would drop its weights at its next start, and why."""

    group: str
    instance: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.group}: {self.instance} would drop its weights: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What applying comes to. `edits` are new contents of group files, by path; `unseen` says of
    which ranks it is not known what they would drop, and why."""

    edits: Mapping[Path, bytes]
    report: Report
    drops: tuple[Drop, ...]
    unseen: tuple[str, ...]
    news: tuple[str, ...]


def plan(world: World) -> Plan:
    """What applying would do; nothing is changed. ConfigError if the files have faults."""
    edits, faults = _expansions(world)
    found = survey(world.config_dir, world.daemon_environ(), edits=edits)
    report = check(found, world)
    if faults or report.faults:
        raise ConfigError("\n".join(map(str, [*faults, *report.faults])))
    running, unseen = _running(world)
    return Plan(
        edits,
        report,
        tuple(_drops(found, running, world)),
        tuple(unseen),
        tuple(_news(found.config, [record.settings for record in running])),
    )


def write(edits: Mapping[Path, bytes]) -> None:
    """Put the new contents in the place of the old; owner and permissions stay. ConfigError."""
    for path, content in edits.items():
        try:
            replace_file(path, content)
        except OSError as error:
            raise ConfigError(
                f"{path} could not be written: {error.strerror}. It is as it was: run this as root"
            ) from error


def _expansions(world: World) -> tuple[dict[Path, bytes], list[Fault]]:
    edits, faults = {}, []
    gpus = world.gpus()
    for path in group_files(world.config_dir).paths:
        table = read(path)
        if isinstance(table, Fault):
            continue  # told by the survey
        try:
            if (text := expanded(path.read_text(), table, gpus)) is not None:
                edits[path] = text.encode()
        except ConfigError as error:
            faults.append(Fault(str(path), "gpus", str(error)))
    return edits, faults


def _running(world: World) -> tuple[list[Running], list[str]]:
    """What runs, and which ranks left a record that does not tell."""
    running, unseen = [], []
    for path, found in world.records().items():
        try:
            running.append(_record(path.parent.name, found))
            continue
        except InsecurePath as error:
            why = str(error)
        except (OSError, msgspec.MsgspecError, PreloadError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            why = f"{path}: {said} (run this as root)"
        unseen.append(f"{path.parent.name}: whether it would drop its weights is not known: {why}")
    return running, unseen


def _record(instance: str, found: bytes | OSError | InsecurePath) -> Running:
    """The record of `instance`; OSError or InsecurePath as `found`, MsgspecError, or ConfigError if
    it is another's."""
    if not isinstance(found, bytes):
        raise found
    record = msgspec.json.decode(found, type=Running)
    if str(record.settings.parsed_instance) != instance:
        raise ConfigError(f"it is that of {record.settings.instance}")
    return record


def _drops(found: Survey, running: list[Running], world: World) -> Iterator[Drop]:
    config = found.config
    environ = world.service_environ(config.daemon_user)
    find, python = partial(locate, environ=environ), world.python()
    wanted = {
        str(instance): with_versions(rank_settings(config, group, instance, find), python, environ)
        for group in config.groups
        for instance in group.instances
    }
    for record in running:
        settings = record.settings
        reasons = drops(record, wanted.get(settings.instance), _files)
        if reasons:
            yield Drop(settings.group, settings.instance, reasons)


def _files(folder: str) -> tuple[FileIdentity, ...]:
    """The files of a checkpoint; none if it cannot be looked at."""
    try:
        return tuple(identities_of(Path(folder)))
    except (PreloadError, OSError):
        return ()


def _news(config: HostConfig, running: list[RankSettings]) -> Iterator[str]:
    """What an administrator has to do for the rest to take effect."""
    lively = {settings.instance: settings for settings in running}
    for group in config.groups:
        ranks = [lively.get(str(instance)) for instance in group.instances]
        target = f"preloadd-group@{group.name}.target"
        if not any(ranks):
            yield f"{group.name}: does not run: `systemctl start {target}`"
        elif not all(rank and rank.group == group.name for rank in ranks):
            yield f"{group.name}: has other ranks now: `systemctl restart {target}`"
        else:
            yield f"{group.name}: runs; changes count from `systemctl restart {target}` on"
    yield from _left_over(config, running)


def _left_over(config: HostConfig, running: list[RankSettings]) -> Iterator[str]:
    """What runs on though no file has it any more: ranks, and the targets of their groups."""
    names = {group.name for group in config.groups}
    instances = {str(instance) for group in config.groups for instance in group.instances}
    for settings in running:
        if settings.instance not in instances:
            unit = f"preloadd@{settings.instance}.service"
            yield f"{settings.instance}: runs in no group any more: `systemctl stop {unit}`"
    for name in sorted({settings.group for settings in running} - names):
        units = f"preloadd-group@{name}.target preloadd-gate@{name}.service"
        yield f"{name}: is no group any more, and active all the same: `systemctl stop {units}`"
