"""One order to several ranks at once, and what each has to say to it.

A rank that frees memory, or starts to load, waits for engines that measure how much is free. Only
one that does not even say how it is counts as stuck.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from preloadd.cli.control import Say
from preloadd.cli.exits import CommandFailed, Exit
from preloadd.cli.overview import Condition, Rank, holders
from preloadd.cli.ranks import RankAddress, ask_all, look_at, request
from preloadd.errors import EXIT_STATUS, ErrorCode, PreloadError
from preloadd.linux.threads import starting
from preloadd.protocol.messages import Done, NotAvailable, Refused, Reply, Request

SETTLE_S = 10.0
"""Seconds that a rank which waits for no engine may take: the service manager may be slow."""

_GONE = (Condition.STUCK, Condition.ABSENT, Condition.DENIED, Condition.UNCLEAR)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rank that did not do it: why, and the exit status for that."""

    rank: Rank
    why: str
    status: int


class Refusals(PreloadError):
    """Some ranks did not do what they were asked; the others did."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        self._status = refusals[0].status
        super().__init__("\n".join(f"{r.rank.group} {r.rank.instance}: {r.why}" for r in refusals))

    @property
    def exit_status(self) -> int:
        """That of the first refusal."""
        return self._status


class Order:
    """One request to `ranks`, each of which has `timeout` seconds to say how it is meanwhile.

    `say` is told what is waited for; `until` is the monotonic time at which nobody waits any more.
    """

    def __init__(
        self, wanted: Request, ranks: Sequence[Rank], *, timeout: float, say: Say, until: float
    ) -> None:
        self._wanted = wanted
        self._ranks = ranks
        self._timeout = timeout
        self._say = say
        self._until = until
        self._told = ""
        self._answers: dict[str, Refusal | None] = {}
        self._done = threading.Event()

    def carry_out(self) -> None:
        """Ask all at once, and wait for all. Refusals if some do not do it.

        CommandFailed when the time is over; the ranks do it all the same.
        """
        with starting("asking the ranks"):
            for rank in self._ranks:
                threading.Thread(target=self._ask, args=[rank], daemon=True).start()
        self._wait()
        refusals = [found for rank in self._ranks if (found := self._answers[rank.socket])]
        if refusals:
            raise Refusals(refusals)

    def _wait(self) -> None:
        settled = time.monotonic() + SETTLE_S
        while waiting := [rank for rank in self._ranks if rank.socket not in self._answers]:
            left = self._until - time.monotonic()
            if self._done.wait(max(0.0, min(self._timeout, left))):
                self._done.clear()
                continue
            if left <= self._timeout:
                told = self._told or self._waited_for(waiting)
                raise CommandFailed(f"the time is over: {told}", Exit.TIMED_OUT)
            if self._look(waiting):
                settled = time.monotonic() + SETTLE_S
            elif time.monotonic() > settled:
                for rank in waiting:
                    why = f"it has not done it after {SETTLE_S:g} s: see its log"
                    self._give_up(rank, why)

    def _look(self, waiting: Sequence[Rank]) -> bool:
        """Give up those that do not even say how they are; whether others wait for engines."""
        now = ask_all([RankAddress.of(rank) for rank in waiting], timeout=self._timeout)
        for rank, seen in zip(waiting, now, strict=True):
            if seen.condition in _GONE:
                self._give_up(rank, seen.detail)
        profiled = [rank for rank in now if any(lease.profiling for lease in rank.leases)]
        if profiled and (told := self._waited_for(profiled)) != self._told:
            self._say(f"waiting: {told}")
            self._told = told
        return bool(profiled)

    def _waited_for(self, ranks: Sequence[Rank]) -> str:
        named = ", ".join(rank.instance for rank in ranks)
        profilers = holders(
            replace(
                rank,
                leases=tuple(lease for lease in rank.leases if lease.profiling),
                lease_count=None,
            )
            for rank in ranks
        )
        if not profilers:
            return f"{named} has not answered yet, and does it once it can"
        return f"{named} frees nothing while engines measure how much memory is free: {profilers}"

    def _give_up(self, rank: Rank, why: str) -> None:
        status = EXIT_STATUS[ErrorCode.UNAVAILABLE]
        self._answers.setdefault(rank.socket, Refusal(rank, why, status))

    def _ask(self, rank: Rank) -> None:
        found = self._refusal(rank)
        self._answers.setdefault(rank.socket, found)
        self._done.set()

    def _refusal(self, rank: Rank) -> Refusal | None:
        try:
            reply = request(
                Path(rank.socket), self._wanted, timeout=self._timeout, patience=math.inf
            )
        except PreloadError as error:
            return Refusal(rank, str(error), error.exit_status)
        refusal = _judged(rank, reply)
        if refusal is None or refusal.status != EXIT_STATUS[ErrorCode.DENIED]:
            return refusal
        # An engine may have attached since we looked: that is not a lack of rights.
        in_use = look_at(RankAddress.of(rank), timeout=self._timeout).in_use
        return replace(refusal, status=Exit.IN_USE) if in_use else refusal


def _judged(rank: Rank, reply: Reply) -> Refusal | None:
    match reply:
        case Done():
            return None
        case Refused():
            return Refusal(rank, reply.detail, _status_of(reply.code))
        case NotAvailable():
            return Refusal(rank, reply.detail, EXIT_STATUS[ErrorCode.UNAVAILABLE])
        case _:
            return Refusal(rank, f"it answered {reply}", EXIT_STATUS[ErrorCode.PROTOCOL])


def _status_of(code: str) -> int:
    """The exit status of a code that came over the wire, which may be a newer daemon's."""
    try:
        return EXIT_STATUS[ErrorCode(code)]
    except ValueError:
        return EXIT_STATUS[ErrorCode.INTERNAL]
