"""What can be seeded is a kind: one half answers where the state is, one asks where it is not.

Both are plug-ins. A kind is known by its name, and says itself what its requests and payloads hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Generic, Protocol, TypeVar

from preloadd.errors import ErrorCode, PreloadError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Kind(Protocol):
    """The half at the source."""

    @property
    def name(self) -> str:
        """As requests name it."""

    def resolve(self, fields: Mapping[str, object]) -> bytes | None:
        """The payload, which is JSON, of what `fields` name; None if it is not here.

        ProtocolViolation for any field that is missing or wrong, whose text the peer gets; checked
        before anything of this host is touched. May block; is called from several threads.
        """


class Wanted(Protocol[T_co]):
    """The half at the target: one thing of a kind that this rank is in want of."""

    @property
    def kind(self) -> str:
        """As requests name it."""

    @property
    def fields(self) -> Mapping[str, object]:
        """What names it, in a request."""

    def judged(self, payload: object) -> T_co:
        """What a source sent, checked to its last entry; Unfit. May take a second."""


class Unfit(PreloadError):
    """What a source sent is not to be used here; the text says why."""

    code: ClassVar[ErrorCode] = ErrorCode.MISMATCH


class Outcome(StrEnum):
    """How it ended. Whatever it was but the first two, the rank goes on without."""

    INSTALLED = "installed"
    FETCHED = "fetched"
    MISSING = "missing"
    INCOMPATIBLE = "incompatible"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Seeded(Generic[T]):
    """How it ended, why (for people, with the remedy), and what there is of it."""

    outcome: Outcome
    why: str = ""
    value: T | None = field(default=None, repr=False)
