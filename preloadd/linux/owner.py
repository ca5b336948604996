"""Ownership: one object owns a resource, and gives it up at the end of a block at the latest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Owner(ABC):
    """Something to be closed; `with` does it, however the block ends.

    There is no `__del__`: a leak is found by tests, not hidden by the collector.
    """

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give up what this owns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
