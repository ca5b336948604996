"""What is known of all ranks at one moment, as plain values: what both renderers show. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from preloadd.cli.exits import CommandFailed, Exit


class Condition(StrEnum):
    """How a rank is: what it tells itself, or (from STUCK on) what is seen of it from outside."""

    STARTING = "starting"
    LOADING = "loading"
    SERVING = "serving"
    RELEASED = "released"
    FAILED = "failed"
    STOPPING = "stopping"
    STUCK = "stuck"
    ABSENT = "absent"
    STOPPED = "stopped"
    DENIED = "denied"
    UNCLEAR = "unclear"


_EMPTY = (Condition.RELEASED, Condition.FAILED, Condition.ABSENT, Condition.STOPPED)


@dataclass(frozen=True, slots=True)
class Holder:
    """An engine that holds weights. `pid` is its process, `mode` how it uses them.

    While it is `profiling`, it measures how much memory is free, and no rank there frees any.
    """

    client: str
    pid: int
    mode: str
    generation: str
    profiling: bool = False


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank. Sizes are bytes, `rate` is bytes/s (0: not known), times are seconds.

    `done` of `total` are those of the `phase` of a load. `lease_count` is None where the rank did
    not tell; `leases` may be fewer. `unit` and `active` are systemd's, where it knows of the rank;
    `group` is empty where nobody told.
    """

    instance: str
    condition: Condition
    group: str = ""
    detail: str = ""
    socket: str = ""
    unit: str = ""
    active: str = ""
    restarts: int = 0
    pid: int = 0
    version: str = ""
    model: str = ""
    backend: str = ""
    builder: str = ""
    generation: str = ""
    adopted: bool = False
    tensors: int = 0
    tensor_bytes: int = 0
    arena_bytes: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    rate: float = 0.0
    uptime_s: float = 0.0
    ready_s: float = 0.0
    lease_count: int | None = None
    leases: tuple[Holder, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    key: Mapping[str, str] = field(default_factory=dict)
    warmup: tuple[str, ...] = ()
    divided: str = ""

    @property
    def serving(self) -> bool:
        """Whether it says that it serves; a group that is divided lets nobody in all the same."""
        return self.condition is Condition.SERVING

    @property
    def complaint(self) -> str:
        """Why nobody gets weights from it, in a word: how it is, or "divided"; empty if they do."""
        if self.serving:
            return "divided" if self.divided else ""
        return str(self.condition)

    @property
    def warning(self) -> str:
        """What a rank that serves has to say all the same; empty if nothing."""
        return self.detail if self.serving else ""

    @property
    def place(self) -> str:
        """What tells it from all others, now and later."""
        return self.unit or self.socket

    @property
    def loads(self) -> bool:
        """Whether it loads and tells of how many bytes."""
        return self.condition is Condition.LOADING and self.total > 0

    @property
    def holds(self) -> bool:
        """Whether it has weights to release. One that loads has none yet, unless it warms up."""
        return self.serving or (self.condition is Condition.LOADING and bool(self.generation))

    @property
    def empty(self) -> bool:
        """Whether it has no weights, and will have none before somebody asks for them."""
        return self.condition in _EMPTY

    @property
    def in_use(self) -> bool | None:
        """Whether an engine holds its weights; None where that cannot be known."""
        if self.lease_count is not None:
            return self.lease_count > 0
        # A rank that is being restarted keeps its leases, and one that hangs does so too.
        gone = self.condition in (Condition.ABSENT, Condition.STOPPED, Condition.FAILED)
        return False if gone and self.active in ("", "inactive", "failed") else None


@dataclass(frozen=True, slots=True)
class Group:
    """One model on this host. `target` is systemd's unit of the group, where it manages it."""

    name: str
    serving: bool
    target: str = ""
    active: str = ""
    ranks: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything. `notes` say what could not be looked at; `healthy` when all ranks serve.

    `looked_in` are the folders in which sockets were looked for.
    """

    healthy: bool
    groups: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()
    looked_in: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks of all groups."""
        return tuple(rank for group in self.groups for rank in group.ranks)

    @property
    def exit_status(self) -> Exit:
        """What `status` ends with."""
        if not self.groups:
            return Exit.NOTHING_THERE
        return Exit.DONE if self.healthy else Exit.NOT_SERVING


@dataclass(frozen=True, slots=True)
class Managed:
    """A group as systemd knows it: its target, how that is, and the instances of its ranks."""

    target: str
    active: str
    instances: tuple[str, ...] = ()


def overview(
    ranks: Iterable[Rank],
    managed: Mapping[str, Managed],
    notes: Sequence[str] = (),
    looked_in: Sequence[str] = (),
) -> Overview:
    """The ranks sorted into groups: those of systemd in its order of ranks, then all others."""
    members: dict[str, list[Rank]] = {name: [] for name in sorted(managed)}
    for rank in sorted(ranks, key=_in_order):
        members.setdefault(rank.group, []).append(rank)
    groups = tuple(_group(name, found, managed.get(name)) for name, found in members.items())
    return _judged(groups, tuple(notes), tuple(looked_in))


def select(seen: Overview, names: Collection[str]) -> Overview:
    """Only the groups of these names, all if there are none; CommandFailed for one that is not."""
    if not names:
        return seen
    known = {group.name: group for group in seen.groups}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise CommandFailed(
            f"there is no group {', '.join(unknown)} here: {_known(seen)}{_elsewhere(seen)}",
            Exit.NOT_FOUND,
        )
    return _judged(tuple(known[name] for name in dict.fromkeys(names)), seen.notes, seen.looked_in)


def remembering(seen: Overview, name: str, places: Collection[str]) -> Overview:
    """`seen`, in which a rank at one of `places` that tells no group, as one that hangs, or is
    started again after a crash, is still one of the group `name`."""
    ranks = [
        replace(rank, group=name) if not rank.group and rank.place in places else rank
        for rank in seen.ranks
    ]
    managed = {
        group.name: Managed(group.target, group.active, tuple(r.instance for r in group.ranks))
        for group in seen.groups
        if group.target
    }
    return overview(ranks, managed, seen.notes, seen.looked_in)


def with_rates(seen: Overview, before: Iterable[Rank], after: Iterable[Rank], s: float) -> Overview:
    """`seen` with the speed of each load, which `s` seconds lie between `before` and `after`.

    Not known (0) of a load that has come to another phase, for that counts anew.
    """
    done = {(rank.socket, rank.phase): rank.done for rank in before if rank.loads}
    more = {
        rank.socket: rank.done - done.get((rank.socket, rank.phase), rank.done)
        for rank in after
        if rank.loads
    }

    def rated(rank: Rank) -> Rank:
        return replace(rank, rate=max(0, more.get(rank.socket, 0)) / s) if rank.loads else rank

    groups = tuple(
        replace(group, ranks=tuple(rated(rank) for rank in group.ranks)) for group in seen.groups
    )
    return replace(seen, groups=groups)


def complaints(seen: Overview) -> list[str]:
    """One line for each rank that anything is wrong with, and each group that has none."""
    lines = []
    for group in seen.groups:
        lines += [told(rank) for rank in group.ranks if rank.complaint]
        if not group.ranks:
            lines.append(f"{group.name}: it has no ranks: see `preloadctl config check`")
    return lines


def told(rank: Rank) -> str:
    """A rank and how it is, in one line."""
    detail = f": {rank.detail}" if rank.detail else ""
    how = rank.complaint or rank.condition
    return f"{rank.group or '(no group)'} {rank.instance}: {how}{detail}"


def holders(ranks: Iterable[Rank], *, most: int = 5) -> str:
    """Who holds weights of these ranks, each process once, for a message."""
    seen = tuple(ranks)
    found = {(lease.client, lease.pid): None for rank in seen for lease in rank.leases}
    named = [f"{client} (pid {pid})" for client, pid in found]
    named += [
        f"{rank.lease_count} that {rank.instance} does not name"
        for rank in seen
        if rank.lease_count and not rank.leases
    ]
    more = f" and {len(named) - most} more" if len(named) > most else ""
    return ", ".join(named[:most]) + more


def _group(name: str, ranks: Sequence[Rank], managed: Managed | None) -> Group:
    if managed is not None:
        place = {instance: number for number, instance in enumerate(managed.instances)}
        ranks = sorted(ranks, key=lambda rank: place.get(rank.instance, len(place)))
    serving = bool(ranks) and not any(rank.complaint for rank in ranks)
    target, active = (managed.target, managed.active) if managed is not None else ("", "")
    return Group(name, serving, target, active, tuple(ranks))


def _judged(
    groups: tuple[Group, ...], notes: tuple[str, ...], looked_in: tuple[str, ...]
) -> Overview:
    healthy = bool(groups) and all(group.serving for group in groups)
    return Overview(healthy, groups, notes, looked_in)


def _known(seen: Overview) -> str:
    """The groups that there are, and the ranks that may be of any."""
    names = [group.name for group in seen.groups if group.name]
    unnamed = [f"{rank.instance} ({rank.condition})" for rank in seen.ranks if not rank.group]
    parts = [f"there are {', '.join(names)}"] if names else []
    if unnamed:
        parts.append(f"the group of {', '.join(unnamed)} is not known, and may be it")
    return "; ".join(parts) or "no group is configured and no rank was found"


def _elsewhere(seen: Overview) -> str:
    """Where ranks were looked for, and how to look elsewhere."""
    folders = ", ".join(seen.looked_in) or "no folder, since none is there"
    return (
        f" (looked in {folders}; ranks with another socket directory are found with --socket-dir "
        "DIR or PRELOADD_SOCKET_DIR)"
    )


def _in_order(rank: Rank) -> tuple[str, int, str, str]:
    # Shorter names first, so that CPU-10 comes after CPU-9.
    return rank.group, len(rank.instance), rank.instance, rank.socket
