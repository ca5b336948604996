"""What the rank daemons of a group that spans hosts say to each other: messages, frames, claims.

A frame is its length in four bytes, big end first, then msgpack of one tagged message. Whatever
bytes come in, what comes out are messages, or ProtocolViolation. Nobody believes what a peer says
about itself: it is compared with what the others say, and told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from preloadd.domain.ids import Role
from preloadd.domain.key import Difference, differences
from preloadd.errors import ProtocolViolation
from preloadd.protocol.codec import cut

MAX_FRAME = 64 * 1024
"""Bytes after the length."""

MAX_WORLD = 16_384
"""Ranks: so many numbers fit a frame."""

TOLD = 2048
"""Characters of an explanation."""

_HEAD = 4
_VALUE = 160
"""Characters of a differing value that are told."""

_FIELDS = 8

Number = Annotated[int, Meta(ge=0, le=MAX_WORLD)]
Name = Annotated[str, Meta(max_length=256)]
Value = Annotated[str, Meta(max_length=MAX_FRAME)]
Told = Annotated[str, Meta(max_length=TOLD)]
Silence = Annotated[float, Meta(gt=0)]

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages. Unknown fields are ignored, unknown tags refused."""


class Join(Message, frozen=True, tag="join"):
    """Member, first: who this is, and what it claims to be about to load.

    `key` is without the fields that tell a rank's own place. `identifying`: it does not know it
    yet, and will say so again when it does. `serving`: it has these weights already, and needs
    nobody's leave. Said again on one connection, it is another load. `group` is its own name for
    it, which is compared with no other's: whoever comes to one port is of one group. `nodes` is 0
    where nobody knows how many there are, and then `node` says nothing. `drafts`: its group holds a
    draft, of which the key says nothing. `silence`: seconds until it takes one that it does not
    hear for lost.
    """

    preloadd: Name
    group: Name
    role: Name
    builder: Name
    world: Number
    rank: Number
    node: Number
    nodes: Number
    key: Annotated[dict[Name, Value], Meta(max_length=512)]
    drafts: bool = False
    silence: Silence = math.inf
    serving: bool = False
    identifying: bool = False

    def __str__(self) -> str:
        nodes = [self.node] if self.nodes else []
        return ranks_named([self.rank], nodes, self.role)


class Beat(Message, frozen=True, tag="beat"):
    """Both ways: a sign of life. Rank 0 tells which ranks are `missing` while it gathers, whether
    it serves (`free`), so that its loss ends nothing that has only begun, and the `silence` of the
    least patient of all, so that it is heard from everybody in time."""

    missing: Annotated[tuple[Number, ...], Meta(max_length=MAX_WORLD)] = ()
    free: bool = False
    silence: Silence = math.inf


class Agreed(Message, frozen=True, tag="agreed"):
    """From rank 0: all ranks are there and agree, so go on.

    `free`: rank 0 serves, so its own loss ends no load any more. Said again when that becomes so.
    """

    free: bool = False


class Done(Message, frozen=True, tag="done"):
    """From a member: it serves, whatever others do."""


class Failed(Message, frozen=True, tag="failed"):
    """From a member, last: its load failed, and why."""

    why: Told


class Ended(Message, frozen=True, tag="ended"):
    """From rank 0, last: this load has to end, and why."""

    why: Told


FromMember = Join | Beat | Done | Failed
FromConvener = Beat | Agreed | Ended

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

    def receive(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes. ProtocolViolation for a length that is not allowed."""
        self._rest += data
        found = []
        while len(self._rest) >= _HEAD:
            nbytes = int.from_bytes(self._rest[:_HEAD], "big")
            if not 0 < nbytes <= MAX_FRAME:
                raise ProtocolViolation(
                    f"a frame of {nbytes:,} bytes; 1 to {MAX_FRAME:,} are read: that is no "
                    "preloadd rank"
                )
            if len(self._rest) < _HEAD + nbytes:
                break
            found.append(bytes(self._rest[_HEAD : _HEAD + nbytes]))
            del self._rest[: _HEAD + nbytes]
        return found


def disagreement(one: Join, other: Join) -> str:
    """What two ranks claim differently, naming both with both values; '' if they agree."""
    found = differences(_claims(other), _claims(one))
    if not found:
        return ""
    told = "; ".join(_told(one, other, each) for each in found[:_FIELDS])
    told += f"; and {len(found) - _FIELDS} more" if len(found) > _FIELDS else ""
    if one.group != other.group:
        # Maybe those are two groups, and one of them has the other one's port.
        ours, theirs = cut(one.group, _VALUE), cut(other.group, _VALUE)
        told += f"; {one} is of group {ours}, {other} of {theirs}"
    return told


def ranks_named(ranks: Sequence[int], nodes: Iterable[int], role: str = Role.TARGET) -> str:
    """How ranks are named to people: 'ranks 3, 5 of nodes 1, 2', 'ranks 3, 5' where no node is
    known, and 'draft ranks 3, 5' those of a draft, which have numbers of their own."""
    noun = "draft rank" if role == Role.DRAFT else "rank"
    told, known = _counted(noun, ranks), sorted(set(nodes))
    return f"{told} of {_counted('node', known)}" if known else told


def printable(text: str) -> str:
    """`text` as it may be told and logged, whoever wrote it."""
    return cut(text, TOLD)


def _counted(noun: str, numbers: Sequence[int]) -> str:
    told = ", ".join(map(str, numbers[:16])) + (", …" if len(numbers) > 16 else "")
    return f"{noun}{'s' if len(numbers) != 1 else ''} {told}"


def _claims(join: Join) -> dict[str, str]:
    mine = {"preloadd": join.preloadd, "role": join.role, "builder": join.builder}
    return {**join.key, **mine, "draft": "held" if join.drafts else "not held"}


def _told(one: Join, other: Join, difference: Difference) -> str:
    """`daemon` is the other one's value."""
    field = cut(difference.field, _VALUE)
    ours, theirs = (cut(value, _VALUE) for value in (difference.engine, difference.daemon))
    return f"{field} is {ours!r} for {one} but {theirs!r} for {other}"


def _decode(decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M:
    # RecursionError: msgspec lets it out for deep nesting inside of fields that it skips.
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolViolation(f"no message of a rank: {cut(str(error))}") from error
