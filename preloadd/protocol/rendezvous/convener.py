"""Rank 0's side of a meeting: who is there, whether they agree, and what they have to be told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from preloadd.domain.settings import Rendezvous
from preloadd.protocol.rendezvous.claims import disagreement
from preloadd.protocol.rendezvous.messages import (
    BEATS,
    Agreed,
    Beat,
    Done,
    Ended,
    Failed,
    FromConvener,
    FromMember,
    Join,
)
from preloadd.protocol.rendezvous.wording import NETWORK, did_not_come, printable, was_silent

OWN = 0
"""The connection of rank 0 with itself; all others have numbers of their own, from 1."""

_REMEDY = "give all nodes the same model, settings and release of preloadd"


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` on a connection; close it afterwards if it is the `last`."""

    to: int
    message: FromConvener

    @property
    def last(self) -> bool:
        """Whether nothing is to be said any more."""
        return isinstance(self.message, Ended)


class Phase(StrEnum):
    """GATHERING until all ranks were there at once and agreed (LOADING); OPEN once rank 0 serves:
    then nobody waits for others."""

    GATHERING = "gathering"
    LOADING = "loading"
    OPEN = "open"


@dataclass(slots=True)
class _Seat:
    """A rank that is connected. `bound`: it is in a load that ends with that of the others.

    What a rank that is still identifying will claim is not known: nobody is let go before it has.
    """

    source: int
    join: Join
    bound: bool
    heard: float


class Convener:
    """Rank 0's side, in one group.

    Every step returns what has to be sent. `patience` and `silence` are seconds: for all to come,
    and to hear nothing of one of them. A connection is known here once it has joined.
    """

    def __init__(self, place: Rendezvous, *, patience: float, silence: float) -> None:
        self.phase = Phase.GATHERING
        self._place = place
        self._patience = patience
        self._silence = silence
        self._seats: dict[int, _Seat] = {}
        self._agreed: Join | None = None
        self._deadline: float | None = None
        self._beaten = float("-inf")
        self._told: tuple[int, ...] | None = None
        self._turned_away = ""

    @property
    def _least(self) -> float:
        """The silence of the least patient of all that are here."""
        return min([self._silence, *(seat.join.silence for seat in self._seats.values())])

    @property
    def absent(self) -> bool:
        """Whether some rank has not even said that it is there."""
        return len(self._seats) < self._place.world

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that claim nothing yet, or have other weights than those to be loaded."""
        reference = self._reference()
        here = {
            rank
            for rank, seat in self._seats.items()
            if not seat.join.identifying
            and (seat.bound or reference is None or not disagreement(seat.join, reference))
        }
        return tuple(rank for rank in range(self._place.world) if rank not in here)

    def received(self, source: int, message: FromMember, now: float) -> list[Send]:
        """Somebody said something; what breaks the rules ends what it has a part in."""
        seat = self._seat(source)
        if seat is not None:
            seat.heard = now
        if isinstance(message, Join):
            return self._joined(source, message, seat, now)
        if seat is None:
            return [Send(source, _ended("say first who you are"))]
        match message:
            case Beat():
                return []
            case Done():
                return self._served(seat)
            case Failed():
                last = Send(source, _ended("it said that its load failed"))
                return [last, *self._left(seat, f"{seat.join} failed: {message.why}")]

    def gone(self, source: int, why: str) -> list[Send]:
        """A connection is lost, or was given up because of `why`."""
        seat = self._seat(source)
        if seat is None:
            return []
        return self._left(seat, f"{seat.join} was lost while {self._doing}: it {why}")

    def tick(self, now: float) -> list[Send]:
        """Time has passed: who was silent for too long, who did not come, and signs of life."""
        sends: list[Send] = []
        for seat in list(self._seats.values()):
            if seat.source != OWN and now - seat.heard > self._silence:
                # It may have been ended together with one before it.
                sends += self._silent(seat) if self._seat(seat.source) is seat else []
        if self._deadline is not None and now >= self._deadline:
            return sends + self._end(self._missing_told())
        return sends + self._beats(now)

    # -- joining --

    def _joined(self, source: int, join: Join, seat: _Seat | None, now: float) -> list[Send]:
        fault = self._fault(source, join, seat)
        if fault:
            self._turned_away = fault
            left = [] if seat is None else self._left(seat, f"{seat.join}: {fault}")
            return [Send(source, _ended(fault)), *left]
        if join.identifying:
            bound = self.phase is Phase.GATHERING
            self._seats[join.rank] = _Seat(source, join, bound, now)
            free = self.phase is Phase.OPEN
            return [Send(source, Beat(free=free, silence=self._least))]
        if join.serving:
            return self._came_serving(source, join, now)
        self._seats.pop(join.rank, None)
        if self.phase is Phase.OPEN and source == OWN:
            # Another load of rank 0: it waits for nobody either.
            self._agreed = join
        apart = self._apart(join)
        if apart:
            ended = self._end(apart) if self.phase is Phase.GATHERING else []
            # For whoever is not there yet.
            self._turned_away = apart
            return [Send(source, _ended(apart)), *ended]
        bound = self.phase is not Phase.OPEN
        self._seats[join.rank] = _Seat(source, join, bound, now)
        if self.phase is not Phase.GATHERING:
            return [Send(source, Agreed(free=not bound))]
        if self._deadline is None:
            self._deadline = now + self._patience
        self._told = None
        return self._settle()

    def _fault(self, source: int, join: Join, seat: _Seat | None) -> str:
        """What is wrong with a newcomer whatever it would load; '' if nothing is."""
        place = self._place
        ours, theirs = _size(place.world, place.nodes), _size(join.world, join.nodes)
        counts = {nodes for nodes in (place.nodes, join.nodes) if nodes}
        if join.world != place.world or len(counts) > 1:
            return f"{join} is of {theirs}, rank 0 of {ours}: give all nodes the same sizes"
        if join.rank >= place.world or join.node >= (join.nodes or 1):
            return f"there is no {join}: there are {theirs}"
        if (join.rank == place.rank) != (source == OWN):
            return f"{join} is this very rank: give each node a number of its own"
        claimed = seat is not None and seat.bound and not seat.join.identifying
        if claimed or (seat is not None and seat.join.rank != join.rank):
            return "it joined twice"
        other = self._seats.get(join.rank)
        if other is not None and other is not seat:
            return (
                f"{other.join} is here already: give each node a number of its own; after a crash "
                f"of its host, it is let in once nothing was heard of it for {self._silence:g} s"
            )
        return ""

    def _came_serving(self, source: int, join: Join, now: float) -> list[Send]:
        """It has its weights: it is there, if they are those of the others, and never bound."""
        self._seats[join.rank] = _Seat(source, join, bound=False, heard=now)
        if source == OWN:
            return self._opened(join)
        return self._settle() if self.phase is Phase.GATHERING else []

    def _opened(self, join: Join) -> list[Send]:
        """Rank 0 serves what was parked: nobody has to wait for anybody, if they agree with it."""
        self.phase, self._agreed, self._deadline = Phase.OPEN, join, None
        sends = []
        for seat in self._bound():
            if seat.join.identifying:
                seat.bound = False
                sends.append(Send(seat.source, Beat(free=True, silence=self._least)))
            elif apart := self._apart(seat.join):
                del self._seats[seat.join.rank]
                sends.append(Send(seat.source, _ended(apart)))
            else:
                seat.bound = False
                sends.append(Send(seat.source, Agreed(free=True)))
        return sends

    def _settle(self) -> list[Send]:
        """Let all go if all are there; else tell them of whom they wait for."""
        missing = self.missing
        if not missing:
            self.phase, self._agreed, self._deadline = Phase.LOADING, self._reference(), None
            self._told, self._turned_away = None, ""
            return [Send(seat.source, Agreed()) for seat in self._bound()]
        return self._beat_bound(missing)

    def _reference(self) -> Join | None:
        """What all others are compared with."""
        if self._agreed is not None:
            return self._agreed
        claims = (seat.join for seat in self._bound() if not seat.join.identifying)
        return min(claims, key=lambda join: join.rank, default=None)

    def _apart(self, join: Join) -> str:
        """Why it cannot load with the others, and what to do; '' if it can."""
        reference = self._reference()
        told = disagreement(join, reference) if reference is not None else ""
        return f"{told}: {_REMEDY}" if told else ""

    # -- leaving --

    def _served(self, seat: _Seat) -> list[Send]:
        """A load is done. In a gathering nobody can have been let go: it has left."""
        if self.phase is Phase.GATHERING and seat.bound:
            why = f"{seat.join} says that it serves, but nobody may load yet"
            del self._seats[seat.join.rank]
            return [Send(seat.source, _ended(why)), *self._end(why)]
        seat.bound = False
        if seat.source != OWN:
            return []
        self.phase = Phase.OPEN
        return [Send(other.source, Agreed(free=True)) for other in self._bound()]

    def _left(self, seat: _Seat, why: str) -> list[Send]:
        del self._seats[seat.join.rank]
        return self._end(why) if seat.bound else []

    def _silent(self, seat: _Seat) -> list[Send]:
        told = f"nothing was heard of this rank for {self._silence:g} s: {NETWORK}"
        lost = self.gone(seat.source, was_silent(self._silence))
        return [Send(seat.source, _ended(told)), *lost]

    def _end(self, why: str) -> list[Send]:
        """End the load of everyone who is still in it, and be ready for another one."""
        bound = self._bound()
        for seat in bound:
            del self._seats[seat.join.rank]
        if self.phase is Phase.LOADING:
            self.phase, self._agreed = Phase.GATHERING, None
        self._deadline = self._told = None
        self._turned_away = ""
        ended = _ended(why)
        return [Send(seat.source, ended) for seat in bound]

    # -- telling --

    @property
    def _doing(self) -> str:
        return "gathering" if self.phase is Phase.GATHERING else "loading"

    def _missing_told(self) -> str:
        missing = self.missing
        told = did_not_come(missing, self._place, self._patience)
        for rank in missing:
            seat, reference = self._seats.get(rank), self._reference()
            if seat is not None and seat.join.identifying:
                told += f". {seat.join} is there, but still identifies its files"
            elif seat is not None and reference is not None:
                told += f". {seat.join} serves something else: restart it: "
                told += disagreement(seat.join, reference)
        if self._turned_away:
            told += f". A rank that came was turned away: {self._turned_away}"
        return told

    def _beats(self, now: float) -> list[Send]:
        least = self._least
        if now - self._beaten < least / BEATS:
            return []
        self._beaten = now
        missing = self.missing if self._deadline is not None else ()
        return [
            Send(
                seat.source,
                Beat(
                    missing=missing if seat.bound else (),
                    free=self.phase is Phase.OPEN,
                    silence=least,
                ),
            )
            for seat in self._seats.values()
        ]

    def _beat_bound(self, missing: tuple[int, ...]) -> list[Send]:
        if missing == self._told:
            return []
        self._told = missing
        beat = Beat(missing=missing, silence=self._least)
        return [Send(seat.source, beat) for seat in self._bound()]

    def _bound(self) -> list[_Seat]:
        return [seat for seat in self._seats.values() if seat.bound]

    def _seat(self, source: int) -> _Seat | None:
        return next((seat for seat in self._seats.values() if seat.source == source), None)


def _ended(why: str) -> Ended:
    """What is said last on a connection; `why` may hold a peer's own words."""
    return Ended(why=printable(why))


def _size(world: int, nodes: int) -> str:
    return f"{world} ranks on {nodes} nodes" if nodes else f"{world} ranks"
