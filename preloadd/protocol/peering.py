"""Weights from peer to peer: what a rank says with its loader and its sender, and what is asked for
on a stream. Without any I/O.

A stream is a connection between two loaders, made by their ranks. Over it the one that fills asks
for pieces, and is answered with a piece's bytes from where it wants them, and with the digest of
the whole piece. So what broke off goes on over another stream, at the byte where it ended.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import msgspec

from preloadd.domain.settings import Memory
from preloadd.errors import ProtocolViolation
from preloadd.protocol import codec
from preloadd.protocol.messages import Message

PEER = "peer"
"""Name of the inherited descriptor through which a loader asks its rank for streams to a peer."""

PIECE = 8 << 20
"""Bytes that are asked for at once, and have a digest of their own."""

DIGEST_NBYTES = 32
"""BLAKE3 of a piece."""

MANIFEST = 0xFFFF_FFFF
"""The manifest, where a chunk is named by its number."""

MOST_STREAMS = 16
"""Streams that are given for one ticket: more gain nothing between two hosts."""


class PeerAsked(Message, frozen=True, tag="peer-asked"):
    """Loader to rank: have the peer send what has the key of this digest. `streams` connections are
    wanted, and the answer is worth nothing any more after `within` seconds."""

    key: str
    streams: int
    within: float


class PeerGiven(Message, frozen=True, tag="peer-given"):
    """Rank to loader: the peer has it, and the packet has streams to it. Not to be believed: these
    are the peer's own words. `manifest` is the size of the encoded manifest."""

    generation: str
    manifest: int
    chunks: tuple[int, ...]


class PeerAbsent(Message, frozen=True, tag="peer-absent"):
    """Rank to loader: there are no weights to be had, and why; for people."""

    why: str


class ToSend(Message, frozen=True, tag="to-send"):
    """Rank to sender, once: what is to be sent. With it come the manifest, the table of digests and
    every chunk, in this order."""

    memory: Memory
    device: str
    manifest: int
    chunks: tuple[int, ...]


class StreamOpened(Message, frozen=True, tag="stream"):
    """Rank to sender: somebody who may have it; the packet has the connection."""


_asked: msgspec.msgpack.Decoder[PeerAsked | StreamOpened] = msgspec.msgpack.Decoder(
    PeerAsked | StreamOpened
)
_told: msgspec.msgpack.Decoder[PeerGiven | PeerAbsent] = msgspec.msgpack.Decoder(
    PeerGiven | PeerAbsent
)
_orders: msgspec.msgpack.Decoder[ToSend | StreamOpened] = msgspec.msgpack.Decoder(
    ToSend | StreamOpened
)


def decode_asked(data: bytes) -> PeerAsked:
    """What a loader asks its rank for, or ProtocolViolation."""
    asked = codec.decode_by(_asked, data, "a question for a peer")
    if not isinstance(asked, PeerAsked):
        raise ProtocolViolation("the packet is no question for a peer")
    return asked


def decode_told(data: bytes) -> PeerGiven | PeerAbsent:
    """What a rank answers its loader, or ProtocolViolation."""
    return codec.decode_by(_told, data, "word of a peer")


def decode_order(data: bytes) -> ToSend | StreamOpened:
    """What a rank tells its sender, or ProtocolViolation."""
    return codec.decode_by(_orders, data, "an order to send")


_REQUEST = struct.Struct(">III")
REQUEST_NBYTES = _REQUEST.size


@dataclass(frozen=True, slots=True)
class PieceRequest:
    """What is asked for on a stream: of a chunk its piece of this number, from byte `skip` on."""

    chunk: int
    piece: int
    skip: int = 0

    def encode(self) -> bytes:
        """As it is sent."""
        return _REQUEST.pack(self.chunk, self.piece, self.skip)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """From REQUEST_NBYTES bytes, which may say anything."""
        return cls(*_REQUEST.unpack(data))


def pieces(nbytes: int) -> int:
    """How many pieces a chunk of `nbytes` has."""
    return -(-nbytes // PIECE)


def table_nbytes(sizes: Iterable[int]) -> int:
    """Bytes of the table of digests of chunks and manifest: an entry a piece, zeros if unknown."""
    return DIGEST_NBYTES * sum(map(pieces, sizes))


def piece_nbytes(nbytes: int, piece: int) -> int:
    """Bytes of one piece of a chunk of `nbytes`; ProtocolViolation if it has no such piece."""
    if not 0 <= piece < pieces(nbytes):
        raise ProtocolViolation(f"no piece {piece} in {nbytes:,} bytes")
    return min(PIECE, nbytes - piece * PIECE)
