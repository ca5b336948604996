"""A wire between hosts that nobody else can read or speak on: TLS over one of `transport.tcp`.

What whoever connects, or is connected to, has to prove is decided by the context: see
`transport.certificates`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from preloadd.domain.lines import one_line
from preloadd.transport.tcp import Wire

T = TypeVar("T")

NOT_TLS = ("HTTP_REQUEST", "WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
"""The reasons that ssl has for what is no TLS at all."""

_READ = 64 * 1024


class TlsWire:
    """TLS on a `wire`, which it owns. One task may use it at a time; see `tcp.Wire`.

    Before anything else, `greet`. OSError, of which ssl.SSLError is one, if the peer is gone or has
    not proved who it is.
    """

    def __init__(self, wire: Wire, context: ssl.SSLContext, *, host: str | None = None) -> None:
        """`host` is the name or address of the peer that was connected to; None of one that did."""
        self._wire = wire
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._coming,
            self._going,
            server_side=host is None,
            server_hostname=None if host is None else host.strip("[]").partition("%")[0],
        )

    async def greet(self) -> None:
        """Agree with the peer on keys, and have it prove who it is."""
        await self._done(self._tls.do_handshake)

    async def receive(self) -> bytes:
        """What has come; empty at the end."""
        try:
            return await self._done(partial(self._tls.read, _READ))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            # Messages say how long they are: one cut short is seen without a farewell, too.
            return b""

    async def send(self, data: bytes) -> None:
        """Send all of `data`, however slowly the peer reads."""
        left = memoryview(data)
        while left:
            sent = await self._done(partial(self._tls.write, left[:_READ]))
            left = left[sent:]

    def finish(self) -> None:
        """Say nothing more, and let the peer see that once it has read all there is."""
        with suppress(ssl.SSLError):
            self._tls.unwrap()
        self._wire.post(self._going.read())
        self._wire.finish()

    def close(self) -> None:
        """Close the socket; nobody may wait for it any more."""
        self._wire.close()

    async def _done(self, act: Callable[[], T]) -> T:
        """What comes of `act`, for which more may have to be heard and said."""
        while True:
            try:
                result = act()
            except ssl.SSLWantReadError:
                await self._wire.send(self._going.read())
                self._hear(await self._wire.receive())
                continue
            except ssl.SSLError:
                # Where it is an alert, it tells the peer why.
                with suppress(OSError):
                    await self._wire.send(self._going.read())
                raise
            await self._wire.send(self._going.read())
            return result

    def _hear(self, data: bytes) -> None:
        if data:
            self._coming.write(data)
        else:
            self._coming.write_eof()


def refusal(error: ssl.SSLError) -> str:
    """Why a connection came to nothing, with the remedy; '' if trying again may help."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLEOFError):
        return ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not accepted here ({one_line(error.verify_message)}): see the "
            "names in it (`openssl x509 -noout -ext subjectAltName`), and tls_ca"
        )
    if "ALERT" in reason:
        said = reason.rpartition("ALERT_")[2].replace("_", " ").lower()
        return (
            f"it does not accept this host's certificate ({said}): see tls_cert, and tls_ca there"
        )
    if reason in NOT_TLS:
        return "it does not speak TLS: give it tls_cert, or leave out the files for TLS here"
    return f"TLS with it failed ({reason.replace('_', ' ').lower() or one_line(error)})"
