"""What systemd knows of groups and ranks, and what that says of a rank that does not answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from preloadd.cli.overview import Condition, Managed, Rank
from preloadd.linux.systemctl import Systemctl, Unit, unit_name

EVERYTHING = "preloadd.target"
_RANK, _GROUP = "preloadd@.service", "preloadd-group@.target"


@dataclass(frozen=True, slots=True)
class Services:
    """Groups by name, and the units of ranks by instance."""

    groups: Mapping[str, Managed] = field(default_factory=dict)
    ranks: Mapping[str, Unit] = field(default_factory=dict)


def rank_unit(instance: str) -> str:
    """The service of a rank; ConfigError for what is no name."""
    return unit_name(_RANK, instance)


def group_unit(group: str) -> str:
    """The target of a group; ConfigError for what is no name."""
    return unit_name(_GROUP, group)


def group_units(group: str) -> list[str]:
    """All units that belong to a group as such; ConfigError for what is no name."""
    others = ("preloadd-gate@.service", "preloadd-down@.service")
    return [group_unit(group), *(unit_name(template, group) for template in others)]


def ask(systemctl: Systemctl) -> Services:
    """All groups and ranks that are configured or loaded. Raises what `systemctl` does."""
    loaded = systemctl.loaded(["preloadd@*.service", "preloadd-group@*.target"])
    (everything,) = systemctl.show([EVERYTHING])
    found = _shown(systemctl, _GROUP, _of(_GROUP, [*everything.wants, *loaded]))
    # A group that is none any more may leave its target behind, active and without ranks.
    targets = {
        name: unit for name, unit in found.items() if unit.requires or unit.name in everything.wants
    }
    required = [name for target in targets.values() for name in target.requires]
    ranks = _shown(systemctl, _RANK, _of(_RANK, [*required, *loaded]))
    groups = {
        name: Managed(target.name, target.active, tuple(_ordered(target, ranks)))
        for name, target in targets.items()
    }
    return Services(groups, ranks)


def merge(ranks: Sequence[Rank], services: Services) -> list[Rank]:
    """The ranks with what systemd knows of them, and those that only systemd knows of."""
    groups = {i: name for name, group in services.groups.items() for i in group.instances}
    merged, left = [], dict(services.ranks)
    for rank in ranks:
        unit = left.get(rank.instance)
        if unit is not None and _runs(unit, rank):
            del left[rank.instance]
            merged.append(_managed(rank, unit, groups))
        else:
            merged.append(rank)
    merged += [_managed(Rank(i, Condition.ABSENT), unit, groups) for i, unit in left.items()]
    return _neighbours(merged)


def disagree(ranks: Iterable[Rank], services: Services) -> bool:
    """Whether a rank came or went while sockets and systemd were asked, so that they do not fit."""
    found: dict[str, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.instance, []).append(rank)
    running = {i: u for i, u in services.ranks.items() if u.active not in ("inactive", "failed")}
    return any(
        not any(_runs(unit, rank) for rank in found.get(instance, ()))
        for instance, unit in running.items()
        if unit.active == "active" or instance in found
    )


def _runs(unit: Unit, rank: Rank) -> bool:
    """Whether the rank is the unit's, and not one that was started by hand for that device."""
    return rank.pid == unit.main_pid or (rank.pid == 0 and rank.lease_count is None)


def _managed(rank: Rank, unit: Unit, groups: Mapping[str, str]) -> Rank:
    """`rank` with its unit; of one that does not answer, systemd knows better."""
    rank = replace(
        rank,
        unit=unit.name,
        active=unit.active,
        restarts=unit.restarts,
        pid=rank.pid or unit.main_pid,
        group=rank.group or groups.get(rank.instance, ""),
    )
    if rank.lease_count is not None or rank.condition in (Condition.DENIED, Condition.UNCLEAR):
        return rank
    if rank.condition is Condition.STUCK and unit.active == "active":
        return rank
    condition, detail = _condition(rank, unit)
    return replace(rank, condition=condition, detail=detail)


def _condition(rank: Rank, unit: Unit) -> tuple[Condition, str]:
    if unit.loaded not in ("", "loaded"):
        return Condition.ABSENT, f"systemd cannot use {unit.name}: {unit.loaded}"
    again = f", restarts so far: {unit.restarts}" if unit.restarts else ""
    # Its last words, if they say why it ended.
    said, failed, why = unit.status.partition("failed: ")
    last = f"{why}: " if failed and not said else ""
    match unit.active, unit.sub:
        case "activating", "auto-restart":
            return Condition.ABSENT, f"{last}it ended ({unit.result}) and is started again{again}"
        case "activating" | "reloading", _:
            condition = Condition.LOADING if unit.status else Condition.STARTING
            return condition, unit.status or f"process {unit.main_pid} comes up{again}"
        case "deactivating", _:
            return Condition.STOPPING, unit.status
        case "failed", _:
            # Of no group is what the configuration does not know any more.
            remedy = f"preloadctl start {rank.group}" if rank.group else "preloadctl config check"
            return Condition.FAILED, (
                f"{last}systemd gave up ({unit.result}{again}): see "
                f"`preloadctl logs {rank.instance}`, then `{remedy}`"
            )
        case "inactive", _:
            return Condition.STOPPED, ""
        case _:
            return Condition.ABSENT, (
                f"process {unit.main_pid} runs but has no socket in the folders that were searched"
            )


def _neighbours(ranks: Sequence[Rank]) -> list[Rank]:
    """Ranks of no known group given to the one group that has sockets in the same folder."""
    groups: dict[str, set[str]] = {}
    for rank in ranks:
        if rank.group and rank.socket:
            groups.setdefault(_folder(rank), set()).add(rank.group)
    only = {folder: next(iter(found)) for folder, found in groups.items() if len(found) == 1}
    return [
        rank
        if rank.group or rank.unit or not rank.socket
        else replace(rank, group=only.get(_folder(rank), ""))
        for rank in ranks
    ]


def _folder(rank: Rank) -> str:
    return rank.socket.rsplit("/", 2)[0]


def _ordered(target: Unit, ranks: Mapping[str, Unit]) -> list[str]:
    """The instances that a group requires, by rank: systemd tells them in no order."""

    def place(instance: str) -> tuple[int, str]:
        number = ranks[instance].environment.get("PRELOADD_RANK", "")
        return int(number) if number.isdigit() else len(ranks), instance

    return sorted(_of(_RANK, target.requires), key=place)


def _of(template: str, names: Iterable[str]) -> list[str]:
    """The instances of those of the units that are made of `template`, each once."""
    prefix, _, suffix = template.partition("@")
    instances = [
        name.removeprefix(f"{prefix}@").removesuffix(suffix)
        for name in names
        if name.startswith(f"{prefix}@") and name.endswith(suffix)
    ]
    return sorted(set(instances))


def _shown(systemctl: Systemctl, template: str, instances: Sequence[str]) -> dict[str, Unit]:
    names = [unit_name(template, instance) for instance in instances]
    return dict(zip(instances, systemctl.show(names), strict=True))
