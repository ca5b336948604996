"""Groups started, stopped and restarted through their systemd targets, and what comes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from preloadd.cli import units
from preloadd.cli.exits import CommandFailed, Exit
from preloadd.cli.look import Lookout
from preloadd.cli.overview import (
    Condition,
    Group,
    Overview,
    Rank,
    complaints,
    holders,
    select,
)
from preloadd.cli.watch import Teller
from preloadd.cli.words import duration
from preloadd.linux.systemctl import Job, Outcome, Verb

INTERVAL = 1.0
"""Seconds between two looks while a job goes on."""

DRAIN_INTERVAL = 0.5
"""Seconds between two looks for leases."""

NATIVE = "native"
"""The builder whose ranks load and serve without each other."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class How:
    """How to go about it. `timeout` is in seconds for all of it, None for ever."""

    drain: bool = False
    wait: bool = True
    timeout: float | None = None


class Control:
    """Gives orders about groups, and says on `say` what happens meanwhile."""

    def __init__(self, lookout: Lookout, say: Say) -> None:
        self._systemctl = lookout.systemctl
        self._teller = Teller(lookout, say)
        self._say = say

    def carry_out(self, verb: Verb, names: Collection[str], how: How) -> Overview | None:
        """Do it to the groups, all if none is named; how they are then, if that was waited for.

        CommandFailed where that is not what was asked for; then `complaints` are in its text.
        """
        until = _deadline(how)
        seen = self._managed(names)
        if how.drain:
            self._wait_until_free([group.name for group in seen.groups], until)
        if verb is not Verb.STOP:
            self._forget_starts(seen.ranks)
        orders = _orders(verb, seen, everything=not names)
        if not how.wait:
            self._systemctl.enqueue(verb, orders)
            return None
        with self._systemctl.begin(verb, orders) as job:
            outcome = self._follow(job, until)
        after = select(self._teller.look(), [group.name for group in seen.groups])
        _judge(verb, outcome, after)
        return after

    def roll(self, names: Collection[str], how: How) -> Overview:
        """Restart the ranks of the groups one after the other, each serving before the next.

        CommandFailed where the ranks of a group depend on each other, or one does not come back.
        """
        until = _deadline(how)
        seen = self._managed(names)
        for group in seen.groups:
            reason = why_not_rolling(group)
            if reason:
                raise CommandFailed(f"{group.name} is not restarted: {reason}", Exit.UNSUPPORTED)
        for group in seen.groups:
            for number, rank in enumerate(group.ranks):
                left = [later.instance for later in group.ranks[number + 1 :]]
                self._restart_alone(group, rank, left, until)
        return select(self._teller.look(), [group.name for group in seen.groups])

    def _managed(self, names: Collection[str]) -> Overview:
        """The groups, which all are systemd's."""
        seen = select(self._teller.look(), names)
        by_hand = [group for group in seen.groups if not group.target]
        if not names:
            managed = [group.name for group in seen.groups if group.target]
            if managed:
                return select(seen, managed)
            self._systemctl.show([units.EVERYTHING])  # says so if there is no systemd at all
            if not by_hand:
                raise CommandFailed(
                    "no group is configured: write one to /etc/preloadd/groups.d, then run "
                    "`preloadctl config apply`",
                    Exit.NOTHING_THERE,
                )
        for group in by_hand:
            pids = ", ".join(str(rank.pid) for rank in group.ranks if rank.pid)
            raise CommandFailed(
                f"{group.name or 'a rank of no known group'} is not systemd's: its ranks (pid "
                f"{pids}) were started by hand, most likely by `preloadd run`: end or start that",
                Exit.UNSUPPORTED,
            )
        return seen

    def _wait_until_free(self, names: Collection[str], until: float) -> None:
        told = ""
        while True:
            ranks = select(self._teller.look(), names).ranks
            busy = [rank for rank in ranks if rank.in_use is not False]
            if not busy:
                return
            waiting = _held_by(busy)
            if waiting != told:
                self._say(f"waiting: {waiting}")
                told = waiting
            if time.monotonic() >= until:
                raise CommandFailed("the time is over, and nothing was done", Exit.TIMED_OUT)
            time.sleep(DRAIN_INTERVAL)

    def _restart_alone(self, group: Group, rank: Rank, left: list[str], until: float) -> None:
        self._say(f"{group.name} {rank.instance}: restarting")
        self._forget_starts([rank])
        began = time.monotonic()
        with self._systemctl.begin(Verb.RESTART, [rank.unit], alone=True) as job:
            outcome = self._follow(job, until)
        now = [r for r in self._teller.look().ranks if r.unit == rank.unit]
        if not outcome.done or not now or not now[0].serving:
            spared = f"; the restart ends here, before {', '.join(left)}" if left else ""
            raise CommandFailed(
                f"{group.name} {rank.instance} does not serve after its restart: "
                f"{outcome.said or now[0].detail if now else 'it is gone'}{spared}",
                Exit.NOT_SERVING,
            )
        how = "with the weights it had" if now[0].adopted else "after loading them again"
        took = duration(time.monotonic() - began)
        self._say(f"{group.name} {rank.instance}: serves again {how}, {took}")

    def _forget_starts(self, ranks: Iterable[Rank]) -> None:
        """Have systemd count starts anew: orders are not what its limit is for, and at the limit it
        would refuse to start a rank, and so give up the weights."""
        self._systemctl.reset_failed([rank.unit for rank in ranks if rank.unit])

    def _follow(self, job: Job, until: float) -> Outcome:
        """Wait for the end of the job, and say what happens until then."""
        while True:
            outcome = job.wait(max(0.0, min(INTERVAL, until - time.monotonic())))
            if outcome is not None:
                return outcome
            seen = self._teller.look()
            if time.monotonic() >= until:
                lines = "".join(f"\n{line}" for line in complaints(seen))
                raise CommandFailed(
                    "the time is over, and systemd still works on it: see how it goes with "
                    f"`preloadctl status --watch`{lines}",
                    Exit.TIMED_OUT,
                )


def why_not_rolling(group: Group) -> str:
    """Why the ranks of a group cannot be restarted one by one; empty if they can."""
    silent = [f"{r.instance} is {r.condition}" for r in group.ranks if not r.serving]
    if silent or not group.ranks:
        return f"--rolling begins only where every rank serves: {', '.join(silent) or 'none is'}"
    together = {rank.builder for rank in group.ranks} - {NATIVE}
    if together and len(group.ranks) > 1:
        return (
            f"the builder {', '.join(sorted(together))} makes its ranks depend on each other: they "
            "must load together; leave out --rolling"
        )
    return ""


def _deadline(how: How) -> float:
    return math.inf if how.timeout is None else time.monotonic() + how.timeout


def _held_by(busy: Collection[Rank]) -> str:
    """Why these ranks are not free."""
    held = [rank for rank in busy if rank.in_use]
    silent = [f"{rank.instance} ({rank.condition})" for rank in busy if rank.in_use is None]
    parts = [f"engines hold the weights: {holders(held)}"] if held else []
    if silent:
        parts.append(f"whether engines hold the weights of {', '.join(silent)} is not known")
    return "; ".join(parts)


def _orders(verb: Verb, seen: Overview, *, everything: bool) -> list[str]:
    """The units to order `verb` for."""
    found = [group.target for group in seen.groups]
    if everything:
        found.insert(0, units.EVERYTHING)
    if verb is Verb.STOP:
        # A target's stop is over before that of its ranks: only who names them waits for them.
        found += [rank.unit for rank in seen.ranks if rank.unit]
    return found


def _judge(verb: Verb, outcome: Outcome, after: Overview) -> None:
    """CommandFailed unless what was asked for is so."""
    if verb is Verb.STOP:
        failed = [] if outcome.done else [outcome.said]
    else:
        # Who may not ask a rank must believe systemd, which waited until it was ready.
        bad = [r for r in after.ranks if r.complaint and r.condition is not Condition.DENIED]
        failed = complaints(after) if bad else [outcome.said] * (not outcome.done)
    if failed:
        raise CommandFailed("\n".join(line for line in failed if line), Exit.NOT_SERVING)
