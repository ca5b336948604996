"""Packets: one version byte, then msgpack of one tagged message; never more than MAX_PACKET bytes.

Whatever bytes come in, what comes out is a message of the kind asked for, or ProtocolViolation.
Whether a message is due is not decided here (see `protocol.connection`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from preloadd.errors import PreloadError, ProtocolViolation
from preloadd.protocol.messages import (
    MAX_PACKET,
    VERSION,
    Attach,
    Failed,
    Field,
    LoaderReport,
    Memory,
    Message,
    Mismatched,
    NotAvailable,
    Order,
    Proceed,
    Refused,
    Reply,
    Request,
    StatusTold,
    Tune,
)

M = TypeVar("M")
C = TypeVar("C", Order, Proceed, Tune)

TOLD = 512
"""Characters of a value or an explanation that are told to a peer."""

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
# Of one kind alone msgspec takes a message without its tag, so that an empty map would be one.
_commands: msgspec.msgpack.Decoder[Order | Proceed | Tune] = msgspec.msgpack.Decoder(
    Order | Proceed | Tune
)
_reports: msgspec.msgpack.Decoder[LoaderReport] = msgspec.msgpack.Decoder(LoaderReport)


def encode(message: Message) -> bytes:
    """`message` as a packet, without what may be left out if it does not fit with it.

    Left out are, in this order: of `attach` and `memory` the file identities (the daemon then goes
    by the digest in the key); of `status-told` leases, then the key; of other replies the ends of
    long texts. ProtocolViolation if it does not fit even so, or has text that is not Unicode.
    """
    packet = _packet(message)
    if len(packet) <= MAX_PACKET:
        return packet
    for shorter in _shorter(message):
        candidate = _packet(shorter)
        if len(candidate) <= MAX_PACKET:
            return candidate
    raise ProtocolViolation(
        f"{tag(message)} takes {len(packet):,} bytes and a packet holds {MAX_PACKET:,}: "
        f"{_remedy(message)}"
    )


def decode_request(data: bytes) -> Request:
    """The request in the packet `data`, or ProtocolViolation."""
    return _decode(_requests, data, "a request")


def decode_reply(data: bytes) -> Reply:
    """The reply in the packet `data`, or ProtocolViolation."""
    return _decode(_replies, data, "a reply")


def decode_order(data: bytes) -> Order:
    """The order to a loader in the packet `data`, or ProtocolViolation."""
    return _command(data, Order, "an order")


def decode_proceed(data: bytes) -> Proceed:
    """The leave to fill memory in the packet `data`, or ProtocolViolation."""
    return _command(data, Proceed, "the leave to proceed")


def decode_tune(data: bytes) -> Tune:
    """Whether a loader is to tune, in the packet `data`, or ProtocolViolation."""
    return _command(data, Tune, "the word on tuning")


def decode_report(data: bytes) -> LoaderReport:
    """The loader's report in the packet `data`, or ProtocolViolation."""
    return _decode(_reports, data, "a loader's report")


def decode_by(decoder: msgspec.msgpack.Decoder[M], data: bytes, expected: str) -> M:
    """The message in the packet `data`, as a `decoder` of several has it, or ProtocolViolation."""
    return _decode(decoder, data, expected)


def tag(message: Message) -> str:
    """The name of the message on the wire."""
    return str(message.__struct_config__.tag)


def cut(text: str, limit: int = TOLD) -> str:
    """`text` on one line, printable and at most `limit` long: fit for a peer and for a log."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}"
        for c in text[:limit]
    )


def _packet(message: Message) -> bytes:
    try:
        return bytes((VERSION,)) + _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise ProtocolViolation(f"{tag(message)} holds text that is not Unicode: {error}") from None


def _command(data: bytes, kind: type[C], expected: str) -> C:
    command = _decode(_commands, data, expected)
    if not isinstance(command, kind):
        raise ProtocolViolation(
            f"the packet is not {expected}: Invalid value {tag(command)!r} - at `$.type`"
        )
    return command


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes, expected: str) -> M:
    if not data:
        raise ProtocolViolation(f"an empty packet instead of {expected}")
    if len(data) > MAX_PACKET:
        raise ProtocolViolation(f"a packet of {len(data):,} bytes; at most {MAX_PACKET:,} are read")
    if data[0] != VERSION:
        raise ProtocolViolation(
            f"the packet is of protocol version {data[0]}, this side speaks version {VERSION}: "
            "use the same preloadd release on both sides"
        )
    # PreloadError: values that check themselves when they are made. RecursionError: msgspec lets
    # it out for deep nesting inside of fields that it skips.
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, PreloadError, RecursionError) as error:
        raise ProtocolViolation(f"the packet is not {expected}: {cut(str(error))}") from error


def _shorter(message: Message) -> Iterator[Message]:
    replace = msgspec.structs.replace
    match message:
        case Attach() | Memory():
            yield replace(message, files=())
        case StatusTold():
            count = len(message.leases)
            while count:
                count //= 2
                yield replace(message, leases=message.leases[:count])
            yield replace(message, leases=(), key={})
        case Mismatched():
            for limit in (TOLD // 4, TOLD // 16):
                yield Mismatched(fields=tuple(_cut_field(field, limit) for field in message.fields))
        case NotAvailable() | Refused() | Failed():
            yield replace(message, detail=cut(message.detail))
        case _:
            pass


def _cut_field(field: Field, limit: int) -> Field:
    return Field(
        name=cut(field.name, limit),
        daemon=cut(field.daemon, limit),
        engine=cut(field.engine, limit),
    )


def _remedy(message: Message) -> str:
    if isinstance(message, (Attach, Memory)) and message.key:
        name, value = max(message.key.items(), key=lambda item: len(item[1]))
        return f"key field {name!r} alone has {len(value):,} characters, use a digest of it"
    return "shorten it"
