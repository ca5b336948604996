"""What the ranks told, and whether that is healthy. Pure: nothing is asked here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from preloadd.domain.amounts import progress
from preloadd.domain.lifecycle import State


class Contact(StrEnum):
    """How a rank met the last question."""

    ANSWERED = "answered"
    ABSENT = "absent"
    """Nobody listens."""
    STARTING = "starting"
    """Nobody listens yet, but its daemon runs."""
    STUCK = "stuck"
    """It took the question and says nothing."""
    FAULTY = "faulty"
    """It refused to answer, did not answer as the rank that was asked, or cannot be asked: its
    socket was removed."""


CONDITIONS = (*(str(state) for state in State), Contact.ABSENT, Contact.STUCK, Contact.FAULTY)
"""Every value of `Snapshot.condition`."""

_UNIT_CONDITIONS = {
    "activating": State.STARTING,
    "deactivating": State.STOPPING,
    "failed": State.FAILED,
}


@dataclass(frozen=True, slots=True)
class Engine:
    """One lease: what the engine calls itself, its process and how it holds the weights."""

    client: str
    pid: int
    mode: str
    id: str = ""
    generation: str = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """What the service manager says of a rank's service; words are systemd's."""

    name: str
    active_state: str
    sub_state: str = ""
    result: str = ""
    status: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank at one moment.

    `state` is what the rank said, None when it did not answer; `problem` then says why. A stuck
    rank keeps the other facts of its last answer, which came `age_s` seconds ago (None: never), and
    the question has waited `silent_s` seconds. Sizes are bytes: `done` of `total` are those of the
    `phase` of a load, `arena_bytes` what is held. `started_at` is wall time in seconds since 1970.
    """

    instance: str
    state: State | None = None
    problem: str = ""
    contact: Contact = Contact.ANSWERED
    group: str = ""
    device: str = ""
    role: str = ""
    detail: str = ""
    divided: str = ""
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
    chunks: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    loads: int = 0
    bytes_read: int = 0
    uptime_s: float = 0.0
    ready_s: float = 0.0
    started_at: float = 0.0
    ask_s: float = 0.0
    age_s: float | None = None
    silent_s: float = 0.0
    lease_count: int = 0
    engines: tuple[Engine, ...] = ()
    unit: Unit | None = None

    @property
    def condition(self) -> str:
        """One of `CONDITIONS`: what the rank said; else what its unit is, or how contact failed."""
        if self.contact is Contact.ANSWERED:
            return self.state or Contact.FAULTY
        if self.unit is not None and self.contact is not Contact.FAULTY:
            return _UNIT_CONDITIONS.get(self.unit.active_state, self.contact)
        return self.contact

    @property
    def standing(self) -> tuple[str, bool]:
        """What is worth a line when it changes: the condition, and whether the group is divided."""
        return self.condition, self.divided != ""

    @property
    def warning(self) -> str:
        """What a rank that serves has to say all the same; empty if nothing."""
        return self.detail if self.condition == State.SERVING else ""

    @property
    def name(self) -> str:
        """The rank for people: its instance, and its group where that is known."""
        return f"{self.instance} of {self.group}" if self.group else self.instance


@dataclass(frozen=True, slots=True)
class Verdict:
    """`healthy` when every rank serves; `reasons` is one line for each that does not."""

    healthy: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one model on this host and the verdict over them. `name` is '' if unknown."""

    name: str
    verdict: Verdict
    ranks: tuple[Snapshot, ...]

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the ranks tell: one, unless a draft has another."""
        return tuple(dict.fromkeys(rank.model for rank in self.ranks if rank.model))

    @property
    def serving(self) -> int:
        """How many ranks serve."""
        return sum(not complaint(rank) for rank in self.ranks)


def judge(snapshots: Iterable[Snapshot]) -> Verdict:
    """The verdict over all ranks. Where there is no rank nobody is served: not healthy."""
    seen = tuple(snapshots)
    reasons = tuple(f"{rank.name}: {why}" for rank in seen if (why := complaint(rank)))
    if not seen:
        reasons = ("no rank is being watched",)
    return Verdict(healthy=not reasons, reasons=reasons)


def groups(snapshots: Iterable[Snapshot]) -> tuple[Group, ...]:
    """The ranks by group, groups in the order in which their first rank comes."""
    members: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        members.setdefault(snapshot.group, []).append(snapshot)
    return tuple(Group(name, judge(ranks), tuple(ranks)) for name, ranks in members.items())


def complaint(snapshot: Snapshot) -> str:
    """Why this rank does not serve; empty when it does."""
    match snapshot.contact:
        case Contact.ANSWERED:
            return _state_complaint(snapshot)
        case Contact.ABSENT:
            return _unit_complaint(snapshot.unit) or snapshot.problem
        case Contact.STARTING:
            # It runs, so what is said of a unit that was stopped is old, or of another daemon.
            stopped = snapshot.unit is not None and snapshot.unit.active_state == "inactive"
            return (not stopped and _unit_complaint(snapshot.unit)) or snapshot.problem
        case Contact.STUCK:
            return _unit_complaint(snapshot.unit) or snapshot.problem or _silence(snapshot)
        case Contact.FAULTY:
            return snapshot.problem
        case unreachable:
            assert_never(unreachable)


def _state_complaint(snapshot: Snapshot) -> str:
    match snapshot.state:
        case State.SERVING:
            return snapshot.divided
        case State.LOADING:
            return f"loading{_progress(snapshot)}{_detail(snapshot.detail)}"
        case State.STARTING | State.RELEASED | State.FAILED | State.STOPPING:
            return f"{snapshot.state}{_detail(snapshot.detail)}"
        case None:
            return "did not tell its state"
        case unreachable:
            assert_never(unreachable)


def _unit_complaint(unit: Unit | None) -> str:
    """What the service manager knows of a rank that does not answer; empty if nothing."""
    if unit is None or unit.active_state in {"", "active", "reloading"}:
        return ""
    match unit.active_state:
        case "activating" if unit.sub_state == "auto-restart":
            return f"{unit.name} is about to be restarted{_result(unit)}"
        case "activating":
            return f"{unit.name} is starting{_detail(unit.status)}"
        case "failed":
            return (
                f"{unit.name} has failed{_result(unit)}{_detail(unit.status)}: see "
                f"`journalctl -u {unit.name}`, then `systemctl reset-failed {unit.name}` and start"
            )
        case "inactive":
            return f"{unit.name} is stopped: start its group"
        case other:
            return f"{unit.name} is {other}"


def _silence(snapshot: Snapshot) -> str:
    who = f" (process {snapshot.pid})" if snapshot.pid else ""
    return (
        f"stuck: no answer for {snapshot.silent_s:.0f} s{who}: "
        "see its log, and restart it if it hangs"
    )


def _result(unit: Unit) -> str:
    return f" ({unit.result})" if unit.result not in {"", "success"} else ""


def _progress(snapshot: Snapshot) -> str:
    told = progress(snapshot.phase, snapshot.done, snapshot.total, said=State.LOADING)
    return f", {told}" if told else ""


def _detail(detail: str) -> str:
    return f": {detail}" if detail else ""
