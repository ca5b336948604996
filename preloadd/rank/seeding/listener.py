"""The port at which a rank answers others that are yet to warm up.

Strangers connect here. None of them can end this, make it hold much, or make others wait long: who
says nothing is hung up on, first of all by whoever comes next. No word of theirs is logged.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio.abc import TaskGroup

from preloadd.domain.endpoint import Endpoint
from preloadd.domain.meeting import is_one_host
from preloadd.domain.seeding import EVERYWHERE
from preloadd.errors import PreloadError, ProtocolViolation
from preloadd.rank.seeding.api import Admits, Stream
from preloadd.rank.seeding.crowd import MOST, Crowd, most_of, of_one_peer
from preloadd.transport import tcp
from preloadd.transport.threads import Overdue, Threads
from preloadd.transport.tls import NOT_TLS, TlsWire, refusal
from preloadd.warmup.seeding import messages as m
from preloadd.warmup.seeding.frames import MAX_REQUEST, Frame, framed
from preloadd.warmup.seeding.kinds import Kind

log = logging.getLogger(__name__)

Wire = tcp.Wire | TlsWire

REQUEST_S = 10.0
"""Seconds for a whole request, from when its sender was accepted."""

EXCHANGE_S = 60.0
"""Seconds for all that comes after a good token."""

RESOLVE_S = 20.0
"""Seconds of those for finding what is asked for: less than vLLM waits for the first byte."""

PAUSE_S = 0.005
"""Seconds that a wrong token keeps its sender's address from having another one looked at."""

_BACKLOG = 4096
"""Connections that the kernel keeps for later. One that it drops is tried again after a second."""

_ANSWERS = 16
_ANSWERS_EACH = 4
_WAITING_EACH = 32
_FAREWELL_S = 1.0
_QUIET_S = 60.0
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(slots=True)
class _Address:
    """What all guests of one address share."""

    guests: int = 0
    looking: anyio.Lock = field(default_factory=anyio.Lock)
    answers: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(_ANSWERS_EACH))


class Listener:
    """Answers with `kinds` whoever has a token that is good. `serve` it once.

    With `tls`, which gives the context for a connection, it is with those alone who speak that.
    """

    def __init__(
        self,
        host: str,
        port: int,
        kinds: Iterable[Kind],
        admits: Admits,
        *,
        streams: Iterable[Stream] = (),
        tls: Callable[[], Awaitable[ssl.SSLContext]] | None = None,
    ) -> None:
        self.port = tcp.Port(self._listen, self._why)
        self._place = Endpoint(host, port)
        self._kinds = {kind.name: kind for kind in kinds}
        self._streams = {stream.name: stream for stream in streams}
        self._admits = admits
        self._tls = tls
        self._crowd = Crowd(_most())
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._addresses: dict[str, _Address] = {}
        self._answers = anyio.Semaphore(_ANSWERS)
        self._threads = {name: Threads(f"what has {name}") for name in self._kinds}
        self._numbers = 0
        self._quiet_until: dict[str, float] = {}

    async def serve(self) -> None:
        """Answer whoever comes, until cancelled."""
        async with anyio.create_task_group() as tasks:
            await self.port.serve(partial(self._welcome, tasks), "a peer")

    async def _listen(self) -> list[socket.socket]:
        host = self._place.host
        listeners = await tcp.listen(host, self._place.port, _BACKLOG)
        log.info("others are seeded at %s", self._place)
        if self._tls is None and (host in EVERYWHERE or not is_one_host(host)):
            log.warning(
                "others are seeded at %s without TLS: tokens and what is fetched can be read on "
                "the way; let only trusted hosts reach it, or give tls_cert",
                self._place,
            )
        return listeners

    def _why(self, error: OSError) -> str:
        """Why others cannot be seeded, and what to do."""
        remedy = f"see `ss -ltnp 'sport = :{self._place.port}'` for who has the port"
        if isinstance(error, socket.gaierror) or error.errno in _NOT_HERE:
            remedy = (
                f"{self._place.host} is no address of this host: correct listen_host, or "
                "--seed-listen-host"
            )
        return f"others cannot be seeded at {self._place}: {error.strerror or error}; {remedy}"

    def _welcome(self, tasks: TaskGroup, sock: socket.socket, whence: tuple[str, int]) -> None:
        address = of_one_peer(whence[0])
        self._numbers += 1
        leaving = self._crowd.arrived(self._numbers, address)
        if leaving is not None:
            self._scopes[leaving].cancel()
        scope = anyio.CancelScope(deadline=anyio.current_time() + REQUEST_S)
        self._scopes[self._numbers] = scope
        tasks.start_soon(self._hear, self._numbers, sock, address, scope)

    async def _hear(
        self, number: int, sock: socket.socket, address: str, scope: anyio.CancelScope
    ) -> None:
        """One guest, from when it came until it is gone."""
        with sock, scope, self._sharing(address) as shared:
            try:
                wire = await self._greeted(sock)
                if not await self._exchange(number, address, shared, wire, scope):
                    wire.finish()
            except ssl.SSLCertVerificationError as error:
                text = "a peer at %s was hung up on: %s"
                self._say_once(f"{address} unknown", text, address, refusal(error))
            except OSError as error:
                log.debug("a peer at %s hung up: %s", address, error.strerror)
            except PreloadError as error:
                # What is wrong is ours, and the same for all.
                self._say_once("ours", "nobody is heard: %s", error)
            except Exception:  # noqa: BLE001 - logged, but not at every connection
                text = "a peer at %s was hung up on, because hearing it failed"
                self._say_once(f"{address} failed", text, address, exc_info=True)
            finally:
                self._crowd.left(number)
                del self._scopes[number]

    async def _greeted(self, sock: socket.socket) -> Wire:
        wire = tcp.Wire(sock)
        if self._tls is None:
            return wire
        private = TlsWire(wire, await self._tls())
        try:
            await private.greet()
        except ssl.SSLError as error:
            if error.reason in NOT_TLS:
                with anyio.move_on_after(_FAREWELL_S):
                    await wire.send(framed(m.failed(m.TLS_ONLY)))
                    wire.finish()
            raise
        return private

    @contextmanager
    def _sharing(self, address: str) -> Iterator[_Address]:
        shared = self._addresses.setdefault(address, _Address())
        shared.guests += 1
        try:
            yield shared
        finally:
            shared.guests -= 1
            if not shared.guests:
                del self._addresses[address]

    async def _exchange(
        self,
        number: int,
        address: str,
        shared: _Address,
        wire: Wire,
        scope: anyio.CancelScope,
    ) -> bool:
        """Hear the request, and answer it if its token is good. Whether others go on with it."""
        try:
            raw = await _request(wire)
            self._crowd.asked(number)
            request = m.parse_request(raw)
            await self._authenticate(request.token, address, shared)
        except ProtocolViolation as error:
            with anyio.move_on_after(_FAREWELL_S):
                await wire.send(framed(m.failed(str(error))))
            return False
        self._crowd.left(number)
        scope.deadline = anyio.current_time() + EXCHANGE_S
        if shared.answers.statistics().tasks_waiting >= _WAITING_EACH:
            await wire.send(framed(m.failed("there are too many requests of this peer")))
            return False
        async with shared.answers, self._answers:
            if (stream := self._streams.get(request.kind)) is not None:
                return await _handed_over(stream, request, wire)
            answer = await self._answered(request, address)
            await wire.send(framed(answer))
        return False

    async def _authenticate(self, token: bytes, address: str, shared: _Address) -> None:
        """ProtocolViolation if the token is not good, after a while in which no other is tried."""
        async with shared.looking:
            if await self._admits(token):
                return
            await anyio.sleep(PAUSE_S)
        self._say_once(address, "a peer at %s has no token that is valid here", address)
        raise ProtocolViolation(m.UNAUTHORIZED)

    async def _answered(self, request: m.Request, address: str) -> bytes:
        """The answer to somebody whose token is good, and who may send anything all the same."""
        kind = self._kinds.get(request.kind)
        if kind is None:
            return m.failed(m.UNSUPPORTED)
        try:
            find = partial(kind.resolve, request.fields)
            payload = await self._threads[kind.name].run(find, within=RESOLVE_S)
        except Overdue:
            log.warning("what %s asks for was not found within %g s", address, RESOLVE_S)
            return m.failed("it was not found in time")
        except ProtocolViolation as error:
            return m.failed(str(error))
        except (PreloadError, OSError) as error:
            log.warning("what %s asks for could not be read: %s", address, error)
            return m.failed("it could not be read")
        answer = None if payload is None else m.found(payload)
        log.info("%s to %s: %s", kind.name, address, "none is here" if answer is None else "given")
        return m.missed() if answer is None else answer

    def _say_once(self, about: str, text: str, *values: object, exc_info: bool = False) -> None:
        """A warning that strangers can cause: one a minute about each, and about few at all."""
        now = anyio.current_time()
        known = {name: until for name, until in self._quiet_until.items() if until > now}
        if about not in known and len(known) < _ANSWERS:
            known[about] = now + _QUIET_S
            log.warning(text, *values, exc_info=exc_info)
        self._quiet_until = known


def _most() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else most_of(files)


async def _handed_over(stream: Stream, request: m.Request, wire: Wire) -> bool:
    """Have a stream's kind go on with a connection, if it is one that is due."""
    if isinstance(wire, TlsWire):
        await wire.send(framed(m.failed("what comes in a stream is not given with TLS")))
        return False
    try:
        stream.admit(request.fields)
    except ProtocolViolation as error:
        await wire.send(framed(m.failed(str(error))))
        return False
    await wire.send(framed(m.found(b"null") or b""))
    await stream.take(wire.take())
    return True


async def _request(wire: Wire) -> bytes:
    """The bytes of the one request. OSError if the peer is gone, ProtocolViolation."""
    frame = Frame(MAX_REQUEST)
    while data := await wire.receive():
        raw = frame.receive(data)
        if raw is not None:
            return raw
    raise ConnectionResetError(0, "before the end of its request")
