"""What a store is. One that others wrote is found by an entry point of the group `GROUP`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from preloadd.errors import ErrorCode, PreloadError

GROUP = "preloadd.warmup_stores"
"""Entry points of this group name an `Open`."""

DEADLINE_S = 5.0
"""Seconds that a call may take before whoever asked goes on without that store."""

MAX_NBYTES = 1 << 28
"""Of one value. Whoever asks says a smaller limit where there is one."""

Fit = Callable[[bytes], bool]
"""Whether a value is of use to whoever asks for it, or is damaged."""

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_KEY = re.compile(rf"{_PART}(?:/{_PART}){{0,7}}")


class StoreFault(PreloadError):
    """A store did not do what it was asked; the text says why, and does not name the store."""

    code: ClassVar[ErrorCode] = ErrorCode.UNAVAILABLE


class Store(Protocol):
    """Values that others see as well, by keys that `require_key` lets pass.

    It is made, asked and closed in one thread, one call at a time. A call that takes longer than
    `DEADLINE_S` is not waited for, and until it has returned no other is made.
    """

    @property
    def name(self) -> str:
        """As people are told it, and as they wrote it."""

    def find(self, key: str, limit: int) -> bytes | None:
        """The value of that key; None if there is none.

        PreloadError or OSError if that cannot be told, or if it has more than `limit` bytes.
        """

    def keep(self, key: str, value: bytes) -> None:
        """Have others find the value, unless they find one already: the first writer wins.

        PreloadError or OSError.
        """

    def replace(self, key: str, value: bytes) -> None:
        """Have others find this value from now on; whoever reads meanwhile gets one or the other.

        Asked for only where what was found is damaged. PreloadError or OSError.
        """

    def close(self) -> None:
        """Let go of everything."""


class Shared(Protocol):
    """The stores of a group as those see them who use them: asked in order, and written to all."""

    @property
    def names(self) -> Sequence[str]:
        """Of each store."""

    @property
    def faults(self) -> Sequence[str]:
        """What is wrong with them now, a line each."""

    def find(self, key: str, limit: int, fit: Fit | None = None) -> bytes | None:
        """What the first has that has it, and `fit`; None. PreloadError, OSError."""

    def keep(self, key: str, value: bytes, fit: Fit | None = None) -> None:
        """Put it into each, in the place of what is not `fit`. PreloadError, OSError."""

    def close(self) -> None:
        """Let go of them."""


Open = Callable[[str, Mapping[str, str]], Store]
"""Makes a store of what stands behind the colon of its name ('' if there is none), and of the
environment. ConfigError if it cannot be used as it is configured; the text ends with the remedy."""


def require_key(key: str) -> None:
    """ValueError unless `key` is up to eight names of files with slashes between them."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no key of a store")


def too_long(nbytes: int, limit: int) -> StoreFault:
    """What to raise for a value of more than `limit` bytes."""
    return StoreFault(f"a value has {nbytes:,} bytes, and {limit:,} are the most that is taken")
