"""Weights freed and loaded again while the ranks stay, through their sockets."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from preloadd.cli.control import How, Say
from preloadd.cli.exits import CommandFailed, Exit
from preloadd.cli.look import Lookout
from preloadd.cli.overview import Condition, Overview, Rank, holders, select, told
from preloadd.cli.ranks import Place, in_parallel, look_at, request
from preloadd.cli.watch import Teller
from preloadd.errors import EXIT_STATUS, ErrorCode, PreloadError
from preloadd.protocol.messages import Done, Load, NotAvailable, Refused, Release, Reply, Request

INTERVAL = 0.3
"""Seconds between two looks while ranks load."""

SETTLE_S = 2.0
"""Seconds after which a rank that still is as before a load was asked for has failed again."""


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


def release_weights(lookout: Lookout, name: str, say: Say) -> Overview:
    """Free the weights of a group; how it is afterwards.

    CommandFailed, and nothing was done, while engines hold them or that is not known.
    """
    seen = select(lookout.look(), [name])
    held = [rank for rank in seen.ranks if rank.in_use]
    if held:
        raise CommandFailed(
            f"{name}: engines hold the weights, and nothing was released: {holders(held)}: end "
            "them, or wait for them with `preloadctl leases`",
            Exit.IN_USE,
        )
    silent = [rank for rank in seen.ranks if rank.in_use is None]
    if silent:
        lines = "\n".join(map(told, silent))
        raise CommandFailed(
            f"whether engines hold these weights is not known, and nothing was released:\n{lines}",
            Exit.NOT_SERVING,
        )
    serving = [rank for rank in seen.ranks if rank.serving]
    if not serving:
        say(f"{name}: there is nothing to release")
    _ask(serving, Release(), lookout.timeout)
    return select(lookout.look(), [name])


def load_again(lookout: Lookout, name: str, how: How, say: Say) -> Overview:
    """Have the weights of a group loaded again; how it is afterwards."""
    until = math.inf if how.timeout is None else time.monotonic() + how.timeout
    teller = Teller(lookout, say)
    seen = select(teller.look(), [name])
    idle = [r for r in seen.ranks if r.condition in (Condition.RELEASED, Condition.FAILED)]
    idle = [rank for rank in idle if rank.lease_count is not None]
    if not idle:
        say(f"{name}: there is nothing to load")
    _ask(idle, Load(), lookout.timeout)
    if not how.wait:
        return select(lookout.look(), [name])
    return _until_loaded(teller, name, {rank.place for rank in idle}, until)


def _until_loaded(teller: Teller, name: str, asked: Collection[str], until: float) -> Overview:
    settled = time.monotonic() + SETTLE_S
    while True:
        seen = select(teller.look(), [name])
        now = time.monotonic()
        waits = [rank for rank in seen.ranks if rank.place in asked and _under_way(rank)]
        if now < settled:
            waits += [rank for rank in seen.ranks if rank.place in asked and not rank.serving]
        if not waits:
            return seen
        if now >= until:
            raise CommandFailed("\n".join(map(told, waits)), Exit.TIMED_OUT)
        time.sleep(INTERVAL)


def _under_way(rank: Rank) -> bool:
    return rank.condition in (Condition.LOADING, Condition.STARTING, Condition.STUCK)


def _ask(ranks: Sequence[Rank], wanted: Request, timeout: float) -> None:
    """Ask all ranks at once; Refusals if some do not do it."""
    answers = in_parallel(lambda rank: _refusal(rank, wanted, timeout), ranks)
    refusals = [answer for answer in answers if answer is not None]
    if refusals:
        raise Refusals(refusals)


def _refusal(rank: Rank, wanted: Request, timeout: float) -> Refusal | None:
    try:
        reply = request(Path(rank.socket), wanted, timeout=timeout)
    except PreloadError as error:
        return Refusal(rank, str(error), error.exit_status)
    refusal = _judged(rank, reply)
    if refusal is None or refusal.status != EXIT_STATUS[ErrorCode.DENIED]:
        return refusal
    # An engine may have attached since we looked: that is not a lack of rights.
    in_use = look_at(Place.of(rank), timeout=timeout).in_use
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
