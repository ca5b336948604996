"""Whom a rank lets in while it warms up: the engine that it has started for that, and nobody else.

That engine shows a pass. Others are told its digest only, so that the ranks of a group let in the
same engine as the one that has started it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

import anyio

from preloadd.domain.ids import LeaseId


class Gate:
    """One that is closed until `open`; `end` asks whoever has closed it to come to an end.

    `leases` are those that were granted meanwhile and last still.
    """

    def __init__(self) -> None:
        self.key = secrets.token_hex(32)
        self.digest = _digest(self.key)
        self.ending = anyio.Event()
        self.why = ""
        self.leases: set[LeaseId] = set()
        self._opened = anyio.Event()

    def end(self, why: str) -> None:
        """Somebody cannot wait: it is to be opened soon."""
        self.why = self.why or why
        self.ending.set()

    def open(self) -> None:
        """Whoever waits goes on."""
        self._opened.set()

    async def opened(self) -> None:
        """Wait until it is open."""
        await self._opened.wait()


def lets_in(digests: Iterable[str], shown: str) -> bool:
    """Whether gates with these digests are open for who shows that pass, or for nobody at all."""
    own = _digest(shown)
    return all(hmac.compare_digest(digest.encode(), own.encode()) for digest in digests)


def _digest(shown: str) -> str:
    return hashlib.sha256(shown.encode()).hexdigest()
