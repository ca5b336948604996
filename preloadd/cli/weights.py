"""Weights freed and loaded again while the ranks stay, through their sockets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from preloadd.cli.asking import Order
from preloadd.cli.control import How, Say
from preloadd.cli.exits import CommandFailed, Exit
from preloadd.cli.look import Lookout
from preloadd.cli.overview import Condition, Overview, Rank, holders, remembering, select, told
from preloadd.cli.watch import Teller, explained
from preloadd.protocol.messages import Load, Release

INTERVAL = 0.3
"""Seconds between two looks while ranks load."""

SETTLE_S = 2.0
"""Seconds after which a rank that still is as before a load was asked for has failed again."""

RETURN_S = 10.0
"""Seconds within which a rank that crashed while it loaded is there again: up to 4 go by before its
next start, which takes some too."""


def release_weights(lookout: Lookout, name: str, say: Say) -> Overview:
    """Free the weights of a group; how it is afterwards.

    CommandFailed, and nothing was done, while engines hold them, or that is not known, or a rank
    has weights coming: it cannot be told to stop that, and the group would be left in two halves.
    """
    seen = select(lookout.look(), [name])
    _require_free(name, seen)
    _require_settled(name, seen)
    holding = [rank for rank in seen.ranks if rank.holds]
    if not holding:
        say(f"{name}: there is nothing to release")
    Order(Release(), holding, timeout=lookout.timeout, say=say, until=math.inf).carry_out()
    places = {rank.place for rank in seen.ranks}
    after = select(remembering(lookout.look(), name, places), [name])
    again = [
        rank for rank in after.ranks if rank.condition in (Condition.LOADING, Condition.SERVING)
    ]
    if again:
        raise CommandFailed(
            f"{name}: the weights were released, but somebody has had these ranks load meanwhile: "
            f"wait until they serve, and release again:\n{_lines(again)}",
            Exit.NOT_SERVING,
        )
    return after


def _require_free(name: str, seen: Overview) -> None:
    held = [rank for rank in seen.ranks if rank.in_use]
    if held:
        raise CommandFailed(
            f"{name}: engines hold the weights, and nothing was released: {holders(held)}; end "
            "them, or see with `preloadctl leases` when they have ended",
            Exit.IN_USE,
        )
    silent = [rank for rank in seen.ranks if rank.in_use is None]
    if silent:
        raise CommandFailed(
            "whether engines hold these weights is not known, and nothing was released:\n"
            f"{_lines(silent)}",
            Exit.NOT_SERVING,
        )


def _require_settled(name: str, seen: Overview) -> None:
    coming = [rank for rank in seen.ranks if not rank.holds and not rank.empty]
    if coming:
        by_hand = not any(group.target for group in seen.groups)
        end = "end the `preloadd run` they are of" if by_hand else f"run `preloadctl stop {name}`"
        raise CommandFailed(
            f"{name}: not all ranks have come to rest, and nothing was released: wait until these "
            f"serve (`preloadctl status {name} --watch`), then release; or {end}, which frees all "
            f"of it:\n{_lines(coming)}",
            Exit.NOT_SERVING,
        )


def load_again(lookout: Lookout, name: str, how: How, say: Say) -> Overview:
    """Have the weights of a group loaded again; how it is afterwards.

    CommandFailed where that took longer than somebody wants to wait.
    """
    until = math.inf if how.timeout is None else time.monotonic() + how.timeout
    teller = Teller(lookout, say)
    seen = select(teller.look(), [name])
    idle = [r for r in seen.ranks if r.condition in (Condition.RELEASED, Condition.FAILED)]
    idle = [rank for rank in idle if rank.lease_count is not None]
    if not idle:
        say(f"{name}: there is nothing to load")
    if not how.wait:
        until = time.monotonic() + lookout.timeout
    try:
        Order(Load(), idle, timeout=lookout.timeout, say=say, until=until).carry_out()
    except CommandFailed:
        if how.wait:
            raise
        say("load is ordered: `preloadctl status --watch` shows how it goes")
    places = {rank.place for rank in seen.ranks}

    def look() -> Overview:
        return select(remembering(teller.look(), name, places), [name])

    return _until_loaded(look, {rank.place for rank in idle}, until) if how.wait else look()


def _until_loaded(look: Callable[[], Overview], asked: Collection[str], until: float) -> Overview:
    settled = going = time.monotonic() + SETTLE_S
    while True:
        seen = look()
        now = time.monotonic()
        ours = [rank for rank in seen.ranks if rank.place in asked]
        waits = [rank for rank in ours if _under_way(rank)]
        if waits:
            going = now + RETURN_S
        if now < settled:
            waits += [rank for rank in ours if not rank.serving]
        elif now < going:
            # It crashed, and is about to be started again.
            waits += [rank for rank in ours if rank.condition is Condition.ABSENT]
        if not waits:
            return seen
        if now >= until:
            raise CommandFailed(_lines(waits), Exit.TIMED_OUT)
        time.sleep(INTERVAL)


def _under_way(rank: Rank) -> bool:
    return rank.condition in (Condition.LOADING, Condition.STARTING, Condition.STUCK)


def _lines(ranks: Iterable[Rank]) -> str:
    """Each rank, how it is and how far it has come, for a message."""
    return "\n".join(told(replace(rank, detail=explained(rank))) for rank in ranks)
