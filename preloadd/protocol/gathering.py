"""The rendezvous of a group that spans hosts, without any I/O: rank 0's side and every rank's own.

All ranks agree on what they load before one of them fills anything; after that each loads alone,
and serves alone. Rank 0 has a `Convener`, which knows everybody; every rank, rank 0 included, has a
`Member`. Time is seconds of whatever clock, given with every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from preloadd.domain.ids import Role
from preloadd.domain.settings import Rendezvous
from preloadd.protocol import rendezvous as r

OWN = 0
"""The connection of rank 0 with itself; all others have numbers of their own, from 1."""

_BEATS = 4
"""Signs of life in the time after which one is missed."""

REMEDY = "give all nodes the same model, settings and release of preloadd"

_NETWORK = "look at its host, and at the network between"


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` on a connection; close it afterwards if it is the `last`."""

    to: int
    message: r.FromConvener
    last: bool = False


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
    join: r.Join
    bound: bool
    heard: float


class Convener:
    """Rank 0's side: who is there, whether they agree, and whom it has to be told.

    Every step returns what has to be sent. `patience` and `silence` are seconds: for all to come,
    and to hear nothing of one of them. A connection is known here once it has joined.
    """

    def __init__(self, place: Rendezvous, *, patience: float, silence: float) -> None:
        self.phase = Phase.GATHERING
        self._place = place
        self._patience = patience
        self._silence = silence
        self._seats: dict[int, _Seat] = {}
        self._agreed: r.Join | None = None
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
            and (seat.bound or reference is None or not r.disagreement(seat.join, reference))
        }
        return tuple(rank for rank in range(self._place.world) if rank not in here)

    def received(self, source: int, message: r.FromMember, now: float) -> list[Send]:
        """Somebody said something; what breaks the rules ends what it has a part in."""
        seat = self._seat(source)
        if seat is not None:
            seat.heard = now
        if isinstance(message, r.Join):
            return self._joined(source, message, seat, now)
        if seat is None:
            return [Send(source, r.Ended(why="say first who you are"), last=True)]
        match message:
            case r.Beat():
                return []
            case r.Done():
                return self._served(seat)
            case r.Failed():
                last = Send(source, r.Ended(why="it said that its load failed"), last=True)
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

    def _joined(self, source: int, join: r.Join, seat: _Seat | None, now: float) -> list[Send]:
        fault = self._fault(source, join, seat)
        if fault:
            self._turned_away = fault
            refusal = Send(source, r.Ended(why=r.printable(fault)), last=True)
            left = [] if seat is None else self._left(seat, f"{seat.join}: {fault}")
            return [refusal, *left]
        if join.identifying:
            bound = self.phase is Phase.GATHERING
            self._seats[join.rank] = _Seat(source, join, bound, now)
            free = self.phase is Phase.OPEN
            return [Send(source, r.Beat(free=free, silence=self._least))]
        if join.serving:
            return self._came_serving(source, join, now)
        self._seats.pop(join.rank, None)
        if self.phase is Phase.OPEN and source == OWN:
            # Another load of rank 0: it waits for nobody either.
            self._agreed = join
        apart = self._apart(join)
        if apart:
            why = f"{apart}: {REMEDY}"
            refusal = Send(source, r.Ended(why=r.printable(why)), last=True)
            ended = self._end(why) if self.phase is Phase.GATHERING else []
            # For whoever is not there yet.
            self._turned_away = why
            return [refusal, *ended]
        bound = self.phase is not Phase.OPEN
        self._seats[join.rank] = _Seat(source, join, bound, now)
        if self.phase is not Phase.GATHERING:
            return [Send(source, r.Agreed(free=not bound))]
        if self._deadline is None:
            self._deadline = now + self._patience
        self._told = None
        return self._settle()

    def _fault(self, source: int, join: r.Join, seat: _Seat | None) -> str:
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

    def _came_serving(self, source: int, join: r.Join, now: float) -> list[Send]:
        """It has its weights: it is there, if they are those of the others, and never bound."""
        self._seats[join.rank] = _Seat(source, join, bound=False, heard=now)
        if source == OWN:
            return self._opened(join)
        return self._settle() if self.phase is Phase.GATHERING else []

    def _opened(self, join: r.Join) -> list[Send]:
        """Rank 0 serves what was parked: nobody has to wait for anybody, if they agree with it."""
        self.phase, self._agreed, self._deadline = Phase.OPEN, join, None
        sends = []
        for seat in self._bound():
            if seat.join.identifying:
                seat.bound = False
                sends.append(Send(seat.source, r.Beat(free=True, silence=self._least)))
            elif apart := r.disagreement(seat.join, join):
                del self._seats[seat.join.rank]
                why = r.printable(f"{apart}: {REMEDY}")
                sends.append(Send(seat.source, r.Ended(why=why), last=True))
            else:
                seat.bound = False
                sends.append(Send(seat.source, r.Agreed(free=True)))
        return sends

    def _settle(self) -> list[Send]:
        """Let all go if all are there; else tell them of whom they wait for."""
        missing = self.missing
        if not missing:
            self.phase, self._agreed, self._deadline = Phase.LOADING, self._reference(), None
            self._told, self._turned_away = None, ""
            return [Send(seat.source, r.Agreed()) for seat in self._bound()]
        return self._beat_bound(missing)

    def _reference(self) -> r.Join | None:
        """What all others are compared with."""
        if self._agreed is not None:
            return self._agreed
        claims = (seat.join for seat in self._bound() if not seat.join.identifying)
        return min(claims, key=lambda join: join.rank, default=None)

    def _apart(self, join: r.Join) -> str:
        reference = self._reference()
        return r.disagreement(join, reference) if reference is not None else ""

    # -- leaving --

    def _served(self, seat: _Seat) -> list[Send]:
        """A load is done. In a gathering nobody can have been let go: it has left."""
        if self.phase is Phase.GATHERING and seat.bound:
            why = f"{seat.join} says that it serves, but nobody may load yet"
            del self._seats[seat.join.rank]
            last = Send(seat.source, r.Ended(why=r.printable(why)), last=True)
            return [last, *self._end(why)]
        seat.bound = False
        if seat.source != OWN:
            return []
        self.phase = Phase.OPEN
        return [Send(other.source, r.Agreed(free=True)) for other in self._bound()]

    def _left(self, seat: _Seat, why: str) -> list[Send]:
        del self._seats[seat.join.rank]
        return self._end(why) if seat.bound else []

    def _silent(self, seat: _Seat) -> list[Send]:
        why = f"was silent for {self._silence:g} s: {_NETWORK}"
        ended = r.Ended(why=f"nothing was heard of this rank for {self._silence:g} s: {_NETWORK}")
        return [Send(seat.source, ended, last=True), *self.gone(seat.source, why)]

    def _end(self, why: str) -> list[Send]:
        """End the load of everyone who is still in it, and be ready for another one."""
        bound = self._bound()
        for seat in bound:
            del self._seats[seat.join.rank]
        if self.phase is Phase.LOADING:
            self.phase, self._agreed = Phase.GATHERING, None
        self._deadline = self._told = None
        self._turned_away = ""
        ended = r.Ended(why=r.printable(why))
        return [Send(seat.source, ended, last=True) for seat in bound]

    # -- telling --

    @property
    def _doing(self) -> str:
        return "gathering" if self.phase is Phase.GATHERING else "loading"

    def _missing_told(self) -> str:
        missing = self.missing
        place = self._place
        told = f"{missing_named(missing, place)} did not come to {place.where} "
        told += f"within {self._patience:g} s: {_look(place)}"
        for rank in missing:
            seat, reference = self._seats.get(rank), self._reference()
            if seat is not None and seat.join.identifying:
                told += f". {seat.join} is there, but still identifies its files"
            elif seat is not None and reference is not None:
                told += f". {seat.join} serves something else: restart it: "
                told += r.disagreement(seat.join, reference)
        if self._turned_away:
            told += f". A rank that came was turned away: {self._turned_away}"
        return told

    def _beats(self, now: float) -> list[Send]:
        least = self._least
        if now - self._beaten < least / _BEATS:
            return []
        self._beaten = now
        missing = self.missing if self._deadline is not None else ()
        return [
            Send(
                seat.source,
                r.Beat(
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
        beat = r.Beat(missing=missing, silence=self._least)
        return [Send(seat.source, beat) for seat in self._bound()]

    def _bound(self) -> list[_Seat]:
        return [seat for seat in self._seats.values() if seat.bound]

    def _seat(self, source: int) -> _Seat | None:
        return next((seat for seat in self._seats.values() if seat.source == source), None)


class Stage(StrEnum):
    """What a rank's own load is up to; of ENDED and IDLE ones nobody else has to know."""

    IDLE = "idle"
    IDENTIFYING = "identifying"
    GATHERING = "gathering"
    LOADING = "loading"
    SERVING = "serving"
    ENDED = "ended"


_UNDER_WAY = (Stage.IDENTIFYING, Stage.GATHERING, Stage.LOADING)


class Member:
    """One rank's own side. Every step returns what has to be sent, if there is a connection.

    `why` says what ended a load. `missing` are the ranks that rank 0 waits for. `pace` is how many
    seconds it lets pass between its own signs of life.
    """

    def __init__(self, place: Rendezvous, *, patience: float, silence: float) -> None:
        self.stage = Stage.IDLE
        self.why = ""
        self.missing: tuple[int, ...] = ()
        self.connected = False
        self.pace = silence / _BEATS
        self._place = place
        self._patience = patience
        self._silence = silence
        self._join: r.Join | None = None
        self._deadline = float("inf")
        self._heard = self._beaten = 0.0
        self._tried = "no answer yet"
        self._answered = False
        self._free = False

    @property
    def wants_connection(self) -> bool:
        """Whether there is something to say on a connection, if there is none."""
        return self.stage in (Stage.IDENTIFYING, Stage.GATHERING, Stage.SERVING)

    def claim(self, join: r.Join, now: float) -> list[r.FromMember]:
        """This is what would be loaded, or is served; or is yet to be identified."""
        self._join, self.why, self.missing, self._free = join, "", (), False
        self.stage = Stage.SERVING if join.serving else Stage.GATHERING
        if join.identifying:
            self.stage = Stage.IDENTIFYING
        self._deadline = now + self._patience
        return [join] if self.connected else []

    def joined(self, now: float) -> list[r.FromMember]:
        """There is a connection now."""
        self.connected, self._heard, self._beaten = True, now, now
        self.pace = self._silence / _BEATS
        self._answered = self._free = False
        return [self._join] if self._join is not None else []

    def unreachable(self, why: str) -> None:
        """An attempt to connect failed."""
        self._tried = why

    def received(self, message: r.FromConvener, now: float) -> None:
        """Rank 0 said something."""
        self._heard, self._answered = now, True
        match message:
            case r.Beat():
                self.missing = message.missing if self.stage is Stage.GATHERING else ()
                self._free = self._free or message.free
                if message.silence < math.inf:  # it is said
                    self.pace = min(self._silence, message.silence) / _BEATS
            case r.Agreed():
                if self.stage is Stage.GATHERING:
                    self.stage, self.missing = Stage.LOADING, ()
                self._free = message.free
            case r.Ended():
                self.end(r.printable(message.why))

    def lost(self, why: str) -> None:
        """The connection is lost, or was given up because of `why`."""
        self.connected = False
        if self.stage in (Stage.IDENTIFYING, Stage.GATHERING) and not self._answered:
            where = self._place.where
            self.end(f"{self._rank_0} gave no answer: what listens at {where} {why}")
        elif self.stage is Stage.GATHERING or (self.stage in _UNDER_WAY and not self._free):
            self.end(f"{self._rank_0} was lost while {self.stage.value}: it {why}")

    def end(self, why: str) -> None:
        """Nothing comes of this load. What is served is served all the same."""
        if self.stage is Stage.SERVING:
            self._tried = why
        elif self.stage in _UNDER_WAY:
            self.stage, self.why = Stage.ENDED, why

    def done(self) -> list[r.FromMember]:
        """The load is done: from now on this rank depends on nobody."""
        if self._join is None or self.stage not in (Stage.LOADING, Stage.ENDED):
            return []
        if self._join.identifying:
            return []
        # What ended meanwhile came too late. Rank 0 hangs up then, and is told anew.
        told = self.connected and self.stage is Stage.LOADING
        self.stage, self.why = Stage.SERVING, ""
        # To be said on every later connection.
        self._join = msgspec.structs.replace(self._join, serving=True)
        return [r.Done()] if told else []

    def failed(self, why: str) -> list[r.FromMember]:
        """The load failed by itself."""
        told = self.connected and self.stage in _UNDER_WAY
        self.end(why)
        return [r.Failed(why=r.printable(why))] if told else []

    def tick(self, now: float) -> list[r.FromMember]:
        """Time has passed: whether it was too much, and signs of life."""
        if self.connected and now - self._heard > self._silence:
            self.lost(f"was silent for {self._silence:g} s: {_NETWORK}")
        if self.stage is Stage.GATHERING and now >= self._deadline:
            return self.failed(self._too_late())
        if self.connected and now - self._beaten >= self.pace:
            self._beaten = now
            return [r.Beat()]
        return []

    def _too_late(self) -> str:
        place = self._place
        where = place.where
        if self.connected:
            who = missing_named(self.missing, place) if self.missing else "the others"
            return f"{who} did not come to {where} within {self._patience:g} s: {_look(place)}"
        return (
            f"{self._rank_0} was not reached at {where} within {self._patience:g} s: "
            f"{self._tried}: {_look(place)}"
        )

    @property
    def _rank_0(self) -> str:
        return missing_named([0], self._place)


def missing_named(missing: Sequence[int], place: Rendezvous) -> str:
    """How ranks that nobody has heard of are named: 'ranks 3, 5 of nodes 1, 2'."""
    return r.ranks_named(missing, _nodes(missing, place), place.role)


def _look(place: Rendezvous) -> str:
    """What to do where ranks do not find each other."""
    same = "address and port are the same on all nodes"
    if place.role is Role.DRAFT:
        same = f"all nodes hold the draft and have the same address and {place.setting}"
    return (
        f"see whether preloadd runs there and what its log says, whether {same}, and whether a "
        "firewall is between them"
    )


def _size(world: int, nodes: int) -> str:
    return f"{world} ranks on {nodes} nodes" if nodes else f"{world} ranks"


def _nodes(ranks: Iterable[int], place: Rendezvous) -> list[int]:
    """Where ranks are, if every node has as many; [] if nobody knows: they have not told either."""
    if not place.nodes:
        return []
    return [rank * place.nodes // place.world for rank in ranks]
