"""Asking a source that is warm, or still starting, for what this rank is in want of."""

from __future__ import annotations

import logging
import ssl
from functools import partial
from typing import TypeVar

import anyio

from preloadd.domain.endpoint import Endpoint
from preloadd.domain.lines import one_line
from preloadd.errors import ProtocolViolation
from preloadd.transport import tcp
from preloadd.transport.threads import Threads
from preloadd.transport.tls import TlsWire, refusal
from preloadd.warmup.seeding import messages as m
from preloadd.warmup.seeding.frames import MAX_ANSWER, Frame, framed
from preloadd.warmup.seeding.kinds import Outcome, Seeded, Unfit, Wanted

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPT_S = 30.0
"""Seconds for one connection and its answer: vLLM's source has others wait for each other."""

_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_MAX_WHY = 500
_PART = 8
_JUDGING = Threads("what judges answers")

_REFUSALS = {
    m.UNAUTHORIZED: "it does not accept this rank's token: give both the same, and see whether "
    "it has expired at the source",
    m.UNSUPPORTED: "it does not know this kind: install the same version on both",
    m.TLS_ONLY: "it speaks TLS: give this host the files for that, too",
    m.INVALID_HASH: "it does not take this hash of a configuration: install the same version on "
    "both",
}


async def fetch(
    source: Endpoint,
    wanted: Wanted[T],
    token: str,
    *,
    within: float,
    tls: ssl.SSLContext | None = None,
) -> Seeded[T]:
    """What `source` has of what is `wanted`, judged; never an error, whatever it sends.

    For `within` seconds a source that cannot be reached, or hangs up, is tried again: it may be
    starting. With `tls` it has to prove who it is, before it is sent anything. Nothing in the
    result, or in a log, holds `token`.
    """
    body = framed(m.request(wanted.kind, wanted.fields, token))
    seeded: Seeded[T] | None = None
    last = "it has not answered"
    pause = _PAUSE_S
    with anyio.move_on_after(within):
        while seeded is None:
            try:
                with anyio.fail_after(ATTEMPT_S):
                    raw = await _asked(source, body, tls)
            except OSError as error:
                if isinstance(error, ssl.SSLError) and (why := refusal(error)):
                    seeded = Seeded(Outcome.INCOMPATIBLE, why)
                    break
                last = _last(error)
                log.debug("asking %s: %s", source, last)
                await anyio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_S)
            except ProtocolViolation as error:
                seeded = Seeded(Outcome.INCOMPATIBLE, f"this is no source: {error}")
            else:
                last = "its answer could not be judged in time"
                seeded = await _JUDGING.run(partial(_judged, raw, wanted))
    if seeded is None:
        seeded = Seeded(Outcome.UNREACHABLE, f"{last} (tried for {round(within, 1):g} s)")
    return Seeded(seeded.outcome, _told(source, seeded.why, token), seeded.value)


def _last(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return "it hung up before TLS was agreed on"
    return (error.strerror or "no answer came in time").lower()


async def _asked(source: Endpoint, body: bytes, tls: ssl.SSLContext | None) -> bytes:
    """The bytes of the answer. OSError if there is none, ProtocolViolation if it is no message."""
    plain = await tcp.connect(source.host, source.port)
    wire = plain if tls is None else TlsWire(plain, tls, host=source.host)
    try:
        if isinstance(wire, TlsWire):
            await wire.greet()
        await wire.send(body)
        frame = Frame(MAX_ANSWER)
        head = b""
        while data := await wire.receive():
            head = head or data[:1]
            if head != b"\0":
                # Lengths begin so, whatever they are of; what other programs say does not.
                raise ProtocolViolation("something else listens there")
            raw = frame.receive(data)
            if raw is not None:
                return raw
    finally:
        wire.close()
    raise ConnectionResetError(0, "it hung up before the end of its answer")


def _judged(raw: bytes, wanted: Wanted[T]) -> Seeded[T]:
    try:
        answer = m.parse_answer(raw)
        match answer.status:
            case m.Status.OK:
                return Seeded(Outcome.FETCHED, "", wanted.judged(answer.payload))
            case m.Status.MISS:
                return Seeded(Outcome.MISSING, "it has none")
            case m.Status.ERROR:
                # Its own words are no business of a log: they may hold anything, a token too.
                why = _REFUSALS.get(answer.message, "it could not answer: see its log")
                return Seeded(Outcome.REFUSED, why)
    except (ProtocolViolation, Unfit) as error:
        return Seeded(Outcome.INCOMPATIBLE, str(error))


def _told(source: Endpoint, why: str, token: str) -> str:
    """Why, in one line, without what the source may have named after the token."""
    if not why:
        return ""
    line = one_line(why)
    if _shows(line, one_line(token)):
        line = "it sends this rank's token back: see what listens there"
    return f"{source}: {line[:_MAX_WHY]}"


def _shows(line: str, token: str) -> bool:
    """Whether a part of `token` is in there that would help somebody."""
    parts = range(max(len(token) - _PART, 0) + 1)
    return any(token[start : start + _PART] in line for start in parts if token)
