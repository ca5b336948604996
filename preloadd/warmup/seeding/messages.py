"""Requests and answers. What comes in is checked to its types; what is wrong is a
ProtocolViolation, whose text has no word of the peer's: it may go into a log, and a token may not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from preloadd.domain.strict_json import Malformed, decode
from preloadd.domain.tokens import presented
from preloadd.errors import ProtocolViolation
from preloadd.warmup.seeding.frames import MAX_ANSWER, MAX_REQUEST

UNAUTHORIZED = "Unauthorized request"
UNSUPPORTED = "unsupported seed kind"
INVALID_HASH = "invalid config_hash"
"""Three faults in vLLM's words, by which either side knows them."""

TLS_ONLY = "this source speaks TLS only"
"""What those are told, in clear, who do not."""

MAX_PARTS = 1024
"""Values in a request, about: of those that fit, many would cost a daemon long, whoever asks."""

_KIND, _TOKEN = "kind", "token"


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody wants: a kind of state, and the fields that say which of it.

    Nothing but the token may be looked at before that is known to be good.
    """

    kind: str
    fields: Mapping[str, object] = field(repr=False)
    token: bytes = field(repr=False)


class Status(StrEnum):
    """What becomes of a request."""

    OK = "ok"
    MISS = "miss"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Answer:
    """The payload if all is well, the message if there was an error. Neither is to be believed."""

    status: Status
    payload: object = field(default=None, repr=False)
    message: str = field(default="", repr=False)


def request(kind: str, fields: Mapping[str, object], token: str) -> bytes:
    """A request, to be framed. ValueError, without its text, for one that nobody would read."""
    body = json.dumps({_KIND: kind, **fields, _TOKEN: token}).encode("ascii")
    if len(body) > MAX_REQUEST:
        raise ValueError(f"a request of {len(body):,} bytes; at most {MAX_REQUEST:,} are read")
    return body


def parse_request(raw: bytes) -> Request:
    """The request in `raw`, of anybody who can connect."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_PARTS:
        raise ProtocolViolation(f"the request has more than {MAX_PARTS:,} values")
    body = _object(raw, MAX_REQUEST)
    if body is None:
        raise ProtocolViolation("the request is no plain JSON object")
    token, kind = body.pop(_TOKEN, None), body.pop(_KIND, None)
    if not isinstance(token, str):
        raise ProtocolViolation(UNAUTHORIZED)
    return Request(kind if isinstance(kind, str) else "", body, presented(token))


def found(payload: bytes) -> bytes | None:
    """The answer with a payload, which is JSON; None if that is more than is ever read."""
    body = b'{"status": "ok", "payload": ' + payload + b"}"
    return body if len(body) <= MAX_ANSWER else None


def missed() -> bytes:
    """The answer if there is no such thing here."""
    return json.dumps({"status": Status.MISS}).encode("ascii")


def failed(message: str) -> bytes:
    """The answer to what is no request, or could not be answered; `message` is for people."""
    return json.dumps({"status": Status.ERROR, "message": message}).encode("ascii")


def parse_answer(raw: bytes) -> Answer:
    """The answer in `raw`, of whoever was at the other end."""
    body = _object(raw, MAX_ANSWER)
    if body is None:
        raise ProtocolViolation("the answer is no plain JSON object")
    status, message = body.get("status"), body.get("message", "")
    if not isinstance(status, str) or status not in tuple(Status) or not isinstance(message, str):
        raise ProtocolViolation("the answer has no status that is known")
    return Answer(Status(status), body.get("payload"), message)


def _object(raw: bytes, limit: int) -> dict[str, object] | None:
    """None rather than an error: an error would keep what was read, and with it the token."""
    try:
        body = decode(raw, limit)
    except Malformed:
        return None
    return body if isinstance(body, dict) else None
