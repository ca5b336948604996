"""Whether FlashInfer uses a table, by where it was tuned. Its rules, so that nobody else has any.

A table whose fields differ in a definite value is another environment's (hard): it is neither used
nor overwritten. One that does not know where it was tuned (soft) is not used, but replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from preloadd.domain.lines import one_line

Metadata = Mapping[str, str | None]

FIELDS = (
    "flashinfer_version",
    "cuda_version",
    "cublas_version",
    "cudnn_version",
    "cudnn_frontend_version",
    "cutlass_dsl_version",
    "gpu",
)
"""What FlashInfer 0.7 writes down of where it tunes."""

ANY = "*"
_INDETERMINATE = (None, "unknown", "None")


class Verdict(StrEnum):
    """What becomes of a table in some environment."""

    EQUAL = "equal"
    SOFT = "soft conflict"
    HARD = "hard conflict"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two environments differ."""

    field: str
    saved: str | None
    current: str | None

    def __str__(self) -> str:
        return f"{one_line(self.field)} is {self.saved!r} there and {self.current!r} here"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences, by what they mean."""

    hard: tuple[Difference, ...] = ()
    soft: tuple[Difference, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """One hard difference decides it."""
        if self.hard:
            return Verdict.HARD
        return Verdict.SOFT if self.soft else Verdict.EQUAL

    def __str__(self) -> str:
        return "; ".join(map(str, (*self.hard, *self.soft)))


def compare(saved: Metadata | None, current: Metadata | None) -> Comparison:
    """How a table with metadata `saved` is to the environment, or the table, with `current`.

    Without metadata a table is of any environment, as with '*' in a field.
    """
    if saved is None or current is None:
        return Comparison()
    hard: list[Difference] = []
    soft: list[Difference] = []
    for field, here in current.items():
        there = saved.get(field)
        if there == here or ANY in (there, here):
            continue
        (soft if there in _INDETERMINATE else hard).append(Difference(field, there, here))
    return Comparison(tuple(hard), tuple(soft))


def unknown_fields(saved: Metadata | None) -> tuple[str, ...]:
    """Fields without a definite value, for which FlashInfer will not use the table on a GPU."""
    if saved is None:
        return ()
    return tuple(field for field in FIELDS if saved.get(field) in _INDETERMINATE)
