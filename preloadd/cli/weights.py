"""Weights freed and loaded again while the ranks stay, through their sockets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from preloadd.cli.asking import Order
from preloadd.cli.control import How, Say
from preloadd.cli.exits import CommandFailed, Exit
from preloadd.cli.look import Lookout
from preloadd.cli.overview import Condition, Overview, Rank, holders, remembering, select, told
from preloadd.cli.watch import Teller
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

    CommandFailed, and nothing was done, while engines hold them or that is not known.
    """
    seen = select(lookout.look(), [name])
    held = [rank for rank in seen.ranks if rank.in_use]
    if held:
        raise CommandFailed(
            f"{name}: engines hold the weights, and nothing was released: {holders(held)}; end "
            "them, or see with `preloadctl leases` when they have ended",
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
    Order(Release(), serving, timeout=lookout.timeout, say=say, until=math.inf).carry_out()
    places = {rank.place for rank in seen.ranks}
    return select(remembering(lookout.look(), name, places), [name])


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
            raise CommandFailed("\n".join(map(told, waits)), Exit.TIMED_OUT)
        time.sleep(INTERVAL)


def _under_way(rank: Rank) -> bool:
    return rank.condition in (Condition.LOADING, Condition.STARTING, Condition.STUCK)
