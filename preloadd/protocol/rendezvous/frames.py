"""How messages of rank daemons cross a wire: encoded, and cut out of a stream again.

A frame is its length in four bytes, big end first, then msgpack of one tagged message. Whatever
bytes come in, what comes out are messages, or ProtocolViolation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from preloadd.errors import ProtocolViolation
from preloadd.protocol.codec import cut
from preloadd.protocol.rendezvous.messages import MAX_FRAME, FromConvener, FromMember

_HEAD = 4
"""Bytes of a length, which counts those after it: at most MAX_FRAME."""

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_from_member: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)
_from_convener: msgspec.msgpack.Decoder[FromConvener] = msgspec.msgpack.Decoder(FromConvener)


def encode(message: FromMember | FromConvener) -> bytes:
    """`message` as a frame; ProtocolViolation if it does not fit one, or is not Unicode."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise ProtocolViolation(f"the message holds text that is not Unicode: {error}") from None
    if len(body) > MAX_FRAME:
        raise ProtocolViolation(f"a frame of {len(body):,} bytes; at most {MAX_FRAME:,} are sent")
    return len(body).to_bytes(_HEAD, "big") + body


def decode_from_member(frame: bytes) -> FromMember:
    """The message to rank 0 in `frame`, or ProtocolViolation."""
    return _decode(_from_member, frame)


def decode_from_convener(frame: bytes) -> FromConvener:
    """The message from rank 0 in `frame`, or ProtocolViolation."""
    return _decode(_from_convener, frame)


class Frames:
    """Cuts a stream of bytes into frames, however it arrives. Keeps less than one frame."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def receive(self, data: bytes) -> Iterator[bytes]:
        """The frames that `data` completes, one after the other. ProtocolViolation where a length
        comes that is not allowed."""
        self._rest += data
        while len(self._rest) >= _HEAD:
            nbytes = int.from_bytes(self._rest[:_HEAD], "big")
            if not 0 < nbytes <= MAX_FRAME:
                raise ProtocolViolation(
                    f"a frame of {nbytes:,} bytes; 1 to {MAX_FRAME:,} are read: that is no "
                    "preloadd rank"
                )
            if len(self._rest) < _HEAD + nbytes:
                break
            frame = bytes(self._rest[_HEAD : _HEAD + nbytes])
            del self._rest[: _HEAD + nbytes]
            yield frame


def _decode(decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M:
    # RecursionError: msgspec lets it out for deep nesting inside of fields that it skips.
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolViolation(f"no message of a rank: {cut(str(error))}") from error
