"""What the ranks told, and whether that is healthy. Pure: nothing is asked here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from preloadd.domain.lifecycle import State


@dataclass(frozen=True, slots=True)
class Engine:
    """One lease: what the engine calls itself, its process and how it holds the weights."""

    client: str
    pid: int
    mode: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank at one moment. `state` is None when it did not answer; `problem` then says why.

    Sizes are bytes: `done` of `total` are those of the load, `arena_bytes` what is held.
    """

    instance: str
    state: State | None = None
    problem: str = ""
    detail: str = ""
    pid: int = 0
    model: str = ""
    generation: str = ""
    adopted: bool = False
    arena_bytes: int = 0
    done: int = 0
    total: int = 0
    lease_count: int = 0
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`healthy` when every rank serves; `reasons` is one line for each that does not."""

    healthy: bool
    reasons: tuple[str, ...]


def judge(snapshots: Iterable[Snapshot]) -> Verdict:
    """The verdict over a group. A group without ranks serves nobody and is not healthy."""
    seen = tuple(snapshots)
    reasons = tuple(reason for reason in map(_complaint, seen) if reason)
    if not seen:
        reasons = ("no rank is being watched",)
    return Verdict(healthy=not reasons, reasons=reasons)


def _complaint(snapshot: Snapshot) -> str:
    """Why this rank does not serve; empty when it does."""
    if snapshot.problem:
        return f"{snapshot.instance}: {snapshot.problem}"
    match snapshot.state:
        case State.SERVING:
            return ""
        case State.LOADING:
            return f"{snapshot.instance}: loading{_progress(snapshot)}{_detail(snapshot)}"
        case State.STARTING | State.RELEASED | State.FAILED | State.STOPPING:
            return f"{snapshot.instance}: {snapshot.state}{_detail(snapshot)}"
        case None:
            return f"{snapshot.instance}: did not tell its state"
        case unreachable:
            assert_never(unreachable)


def _progress(snapshot: Snapshot) -> str:
    if not snapshot.total:
        return ""
    percent = 100 * snapshot.done // snapshot.total
    return f", {snapshot.done:,} of {snapshot.total:,} bytes ({percent}%)"


def _detail(snapshot: Snapshot) -> str:
    return f": {snapshot.detail}" if snapshot.detail else ""
