"""A message between hosts: its length in eight bytes, big end first, then as many of JSON."""

from __future__ import annotations

from preloadd.domain.strict_json import MAX_NBYTES
from preloadd.errors import ProtocolViolation

MAX_REQUEST = 64 * 1024
"""Bytes after the length, as vLLM has it."""

MAX_ANSWER = MAX_NBYTES + 4096
"""Room for the largest table, and for what is around it. vLLM takes answers of eight times that."""

HEAD = 8


class Frame:
    """The one message that a peer has to send, in whatever pieces it arrives.

    Room is made for what has come, never for what is claimed to.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._got = bytearray()

    def receive(self, data: bytes) -> bytes | None:
        """The message that `data` completes; None until then.

        ProtocolViolation for a length that is not allowed, and for anything after the message.
        """
        self._got += data
        if len(self._got) < HEAD:
            return None
        nbytes = int.from_bytes(self._got[:HEAD], "big")
        if not 0 < nbytes <= self._limit:
            raise ProtocolViolation(f"a message of {nbytes:,} bytes; 1 to {self._limit:,} are read")
        more = len(self._got) - HEAD - nbytes
        if more > 0:
            raise ProtocolViolation("there is something after the one message")
        return bytes(self._got[HEAD:]) if more == 0 else None


def framed(body: bytes) -> bytes:
    """`body` as it is sent."""
    return len(body).to_bytes(HEAD, "big") + body
