"""One rank's own side of a meeting: when to say what, and what becomes of its load."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from preloadd.domain.settings import Rendezvous
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
from preloadd.protocol.rendezvous.wording import (
    did_not_come,
    missing_named,
    printable,
    was_silent,
    where_to_look,
)


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
        self.pace = silence / BEATS
        self._place = place
        self._patience = patience
        self._silence = silence
        self._join: Join | None = None
        self._deadline = float("inf")
        self._heard = self._beaten = 0.0
        self._tried = "no answer yet"
        self._answered = False
        self._free = False

    @property
    def wants_connection(self) -> bool:
        """Whether there is something to say on a connection, if there is none."""
        return self.stage in (Stage.IDENTIFYING, Stage.GATHERING, Stage.SERVING)

    def claim(self, join: Join, now: float) -> list[FromMember]:
        """This is what would be loaded, or is served; or is yet to be identified."""
        self._join, self.why, self.missing, self._free = join, "", (), False
        self.stage = Stage.SERVING if join.serving else Stage.GATHERING
        if join.identifying:
            self.stage = Stage.IDENTIFYING
        self._deadline = now + self._patience
        return [join] if self.connected else []

    def joined(self, now: float) -> list[FromMember]:
        """There is a connection now."""
        self.connected, self._heard, self._beaten = True, now, now
        self.pace = self._silence / BEATS
        self._answered = self._free = False
        return [self._join] if self._join is not None else []

    def unreachable(self, why: str) -> None:
        """An attempt to connect failed."""
        self._tried = why

    def received(self, message: FromConvener, now: float) -> None:
        """Rank 0 said something."""
        self._heard, self._answered = now, True
        match message:
            case Beat():
                self.missing = message.missing if self.stage is Stage.GATHERING else ()
                self._free = self._free or message.free
                if message.silence < math.inf:  # it is said
                    self.pace = min(self._silence, message.silence) / BEATS
            case Agreed():
                if self.stage is Stage.GATHERING:
                    self.stage, self.missing = Stage.LOADING, ()
                self._free = message.free
            case Ended():
                self.end(printable(message.why))

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

    def done(self) -> list[FromMember]:
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
        return [Done()] if told else []

    def failed(self, why: str) -> list[FromMember]:
        """The load failed by itself."""
        told = self.connected and self.stage in _UNDER_WAY
        self.end(why)
        return [Failed(why=printable(why))] if told else []

    def tick(self, now: float) -> list[FromMember]:
        """Time has passed: whether it was too much, and signs of life."""
        if self.connected and now - self._heard > self._silence:
            self.lost(was_silent(self._silence))
        if self.stage is Stage.GATHERING and now >= self._deadline:
            return self.failed(self._too_late())
        if self.connected and now - self._beaten >= self.pace:
            self._beaten = now
            return [Beat()]
        return []

    def _too_late(self) -> str:
        place = self._place
        if self.connected:
            return did_not_come(self.missing, place, self._patience)
        return (
            f"{self._rank_0} was not reached at {place.where} within {self._patience:g} s: "
            f"{self._tried}: {where_to_look(place)}"
        )

    @property
    def _rank_0(self) -> str:
        return missing_named([0], self._place)
