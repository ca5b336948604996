"""Putting an edited configuration into effect, and first what that would cost.

systemd is told of the groups; running daemons are not touched. They take up what changed when they
start the next time, so what they would then drop is said now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
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
from preloadd.domain.settings import RankSettings, Running
from preloadd.errors import ConfigError, PreloadError
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
    """What applying comes to. `edits` are new contents of group files, by path."""

    edits: Mapping[Path, bytes]
    report: Report
    drops: tuple[Drop, ...]
    news: tuple[str, ...]


def plan(world: World) -> Plan:
    """What applying would do; nothing is changed. ConfigError if the files have faults."""
    edits, faults = _expansions(world)
    found = survey(world.config_dir, world.daemon_environ(), edits=edits)
    report = check(found, world)
    if faults or report.faults:
        raise ConfigError("\n".join(map(str, [*faults, *report.faults])))
    running = list(_running(world))
    return Plan(
        edits,
        report,
        tuple(_drops(found, running, world)),
        tuple(_news(found.config, running)),
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
    for path in group_files(world.config_dir):
        table = read(path)
        if isinstance(table, Fault):
            continue  # told by the survey
        try:
            if (text := expanded(path.read_text(), table, gpus)) is not None:
                edits[path] = text.encode()
        except ConfigError as error:
            faults.append(Fault(str(path), "gpus", str(error)))
    return edits, faults


def _running(world: World) -> Iterator[RankSettings]:
    for path, raw in world.running():
        with suppress(msgspec.MsgspecError, PreloadError):
            settings = msgspec.json.decode(raw, type=Running).settings
            if str(settings.parsed_instance) == path.parent.name:
                yield settings


def _drops(found: Survey, running: list[RankSettings], world: World) -> Iterator[Drop]:
    config = found.config
    find = partial(locate, environ=world.service_environ(config.daemon_user))
    wanted = {
        str(instance): rank_settings(config, group, instance, find)
        for group in config.groups
        for instance in group.instances
    }
    for settings in running:
        reasons = drops(settings, wanted.get(settings.instance), _same_files)
        if reasons:
            yield Drop(settings.group, settings.instance, reasons)


def _same_files(one: str, other: str) -> bool:
    """Whether two folders hold the same checkpoint; if one cannot be looked at, they do not."""
    try:
        return sorted(identities_of(Path(one))) == sorted(identities_of(Path(other)))
    except (PreloadError, OSError):
        return False


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
