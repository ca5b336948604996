"""One rank as the supervisor sees it: what it told, and what came of asking it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from preloadd.domain.lines import one_line
from preloadd.protocol.messages import StatusTold
from preloadd.supervisor.roster import Expected
from preloadd.supervisor.verdict import Contact, Engine, Snapshot, Unit

SAME_START_S = 2.0
"""Wall time is read again with every answer; less than this apart is the same start."""


class Record:
    """The last facts about one rank. Times are monotonic seconds unless they say otherwise."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self._facts = _nothing_known(expected)
        self._answered_at: float | None = None
        self._asked_at: float | None = None

    def asked(self, *, now: float) -> None:
        """A question went out."""
        self._asked_at = now

    def answered(self, told: StatusTold, *, now: float, wall: float) -> None:
        """Its answer came; `wall` is the wall time in seconds since 1970."""
        asked_at = now if self._asked_at is None else self._asked_at
        facts = replace(from_told(self.expected, told), ask_s=now - asked_at)
        started_at = wall - facts.uptime_s
        before = self._facts
        if facts.pid == before.pid and abs(started_at - before.started_at) < SAME_START_S:
            started_at = before.started_at
        self._facts = replace(facts, started_at=started_at)
        self._answered_at, self._asked_at = now, None

    def silent(self) -> None:
        """The answer is overdue. What was told before stays, except that it serves."""
        self._facts = replace(self._facts, contact=Contact.STUCK, problem="", state=None)

    def lost(self, contact: Contact, problem: str) -> None:
        """It cannot be asked. Nothing that it told before holds any more, but its group's name."""
        self._facts = replace(
            _nothing_known(self.expected),
            group=self._facts.group,
            contact=contact,
            problem=problem,
        )
        self._answered_at = self._asked_at = None

    def snapshot(self, *, now: float, unit: Unit | None = None) -> Snapshot:
        """The facts as of now, with what is known of the rank's service."""
        return replace(
            self._facts,
            unit=unit,
            age_s=None if self._answered_at is None else now - self._answered_at,
            silent_s=0.0 if self._asked_at is None else now - self._asked_at,
        )


def from_told(expected: Expected, told: StatusTold) -> Snapshot:
    """The snapshot that an answer makes. One in another rank's or group's name is a problem.

    Whatever the rank has written is on one line from here on: it reaches logs and terminals.
    """
    problem = one_line(_wrong_name(expected, told))
    written: dict[str, Any] = {
        name: one_line(value) if type(value) is str else value  # enumerations stay what they are
        for name, value in told.shared_with(Snapshot).items()
    }
    facts = written | {
        "instance": str(expected.instance),
        "group": expected.group or one_line(told.group),
        "contact": Contact.FAULTY if problem else Contact.ANSWERED,
        "problem": problem,
        "loads": told.counters.get("loads", 0),
        "bytes_read": told.counters.get("bytes_read", 0),
        "engines": tuple(
            Engine(
                one_line(lease.client),
                lease.pid,
                lease.mode,
                one_line(lease.id),
                one_line(lease.generation),
            )
            for lease in told.leases
        ),
    }
    return Snapshot(**facts)


def _nothing_known(expected: Expected) -> Snapshot:
    instance = expected.instance
    return Snapshot(
        str(instance),
        group=expected.group,
        device=instance.device,
        role=instance.role.value,
        contact=Contact.ABSENT,
        problem="not asked yet",
    )


def _wrong_name(expected: Expected, told: StatusTold) -> str:
    if told.instance != str(expected.instance):
        return f"its socket answers as {told.instance}"
    if expected.group and told.group != expected.group:
        return (
            f"it serves group {told.group}, the configuration wants {expected.group} there: "
            "restart the group"
        )
    return ""
