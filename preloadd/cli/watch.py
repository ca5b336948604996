"""What changed between two moments, one line each, and the loop that tells it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from preloadd.cli.look import Lookout
from preloadd.cli.overview import Condition, Overview, Rank, with_rates
from preloadd.domain.amounts import percent, progress, size

STEP = 10
"""Percent of a load between two lines about it."""


def changes(before: Overview, after: Overview) -> list[str]:
    """One line for everything that became different and matters to a person."""
    old = {rank.place: rank for rank in before.ranks}
    new = {rank.place: rank for rank in after.ranks}
    lines = [line for place, rank in new.items() for line in _changed(old.get(place), rank)]
    lines += [f"{_name(rank)}: gone" for place, rank in old.items() if place not in new]
    return lines + [note for note in after.notes if note not in before.notes]


def moments(
    look: Callable[[], Overview], interval: float, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Overview]:
    """How everything is, again and again, with the speed of loads. Never ends."""
    before, asked = look(), time.monotonic()
    yield before
    while True:
        sleep(interval)
        now = look()
        took, asked = time.monotonic() - asked, time.monotonic()
        yield with_rates(now, before.ranks, now.ranks, took)
        before = now


def state(rank: Rank) -> str:
    """How a rank is in one or two words."""
    return f"{_how(rank)} {percent(rank.done, rank.total)}" if rank.loads else _how(rank)


def explained(rank: Rank) -> str:
    """What there is to say about how a rank is; empty if it just serves."""
    return "; ".join(filter(None, [rank.detail, _progress(rank, said=rank.condition)]))


class Teller:
    """Says what changed since it last looked; the first look is the beginning, told of nothing."""

    def __init__(self, lookout: Lookout, say: Callable[[str], None]) -> None:
        self._look = lookout.look
        self._say = say
        self._last: Overview | None = None

    def look(self) -> Overview:
        """How everything is now, after saying what is new."""
        now = self._look()
        if self._last is not None:
            for line in changes(self._last, now):
                self._say(line)
        self._last = now
        return now


def _changed(old: Rank | None, new: Rank) -> Iterator[str]:
    name = _name(new)
    if old is None or old.complaint != new.complaint:
        was = _how(old) if old is not None else "new"
        detail = explained(new)
        yield f"{name}: {was} -> {_how(new)}{f': {detail}' if detail else ''}"
    elif old.pid != new.pid:
        far = _progress(new)
        told = f"{name}: {_how(new)} as process {new.pid}, was {old.pid}"
        yield f"{told}: {far}" if far else told
    elif _step(old) != _step(new):
        yield f"{name}: {_progress(new) or explained(new) or _how(new)}"
    elif new.warning and old.warning != new.warning:
        yield f"{name}: warning: {new.warning}"
    if old is None or old.lease_count is None or new.lease_count is None:
        return
    had, has = ({(e.client, e.pid) for e in rank.leases} for rank in (old, new))
    yield from (f"{name}: {client} (pid {pid}) attached" for client, pid in sorted(has - had))
    yield from (f"{name}: {client} (pid {pid}) left" for client, pid in sorted(had - has))


def _how(rank: Rank) -> str:
    return rank.complaint or rank.condition


def _progress(rank: Rank, said: str = "") -> str:
    """How far a load is, and how fast; empty if nothing was told, or that was just `said`."""
    if rank.condition is not Condition.LOADING:
        return ""
    rate = f", {size(rank.rate)}/s" if rank.rate else ""
    return progress(rank.phase, rank.done, rank.total, said=said) + rate


def _step(rank: Rank) -> tuple[str, int]:
    return rank.phase, 100 * rank.done // rank.total // STEP if rank.loads else 0


def _name(rank: Rank) -> str:
    return f"{rank.group or '(no group)'} {rank.instance}"
