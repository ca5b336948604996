"""The sender: a short-lived process that sends an arena to the loaders of peers.

It is started by a rank that has the weights, which itself maps nothing and knows no GPU. The rank
has found that whoever is at the other end of a stream may have them; nothing else that comes from
there is believed. Who is silent, or takes a piece too slowly, is hung up on.
"""

from __future__ import annotations

import logging
import mmap
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate

from blake3 import blake3

from preloadd.errors import ProtocolViolation
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.linux.owner import Owner
from preloadd.linux.seqpacket import Packet, socket_of
from preloadd.linux.threads import starting
from preloadd.linux.waits import limit
from preloadd.memory.api import Mapper, Mapping
from preloadd.protocol import payload
from preloadd.protocol.peering import (
    DIGEST_NBYTES,
    MANIFEST,
    MOST_STREAMS,
    PIECE,
    REQUEST_NBYTES,
    PieceRequest,
    StreamOpened,
    ToSend,
    decode_order,
    piece_nbytes,
    pieces,
)
from preloadd.transport.blocking import Link

log = logging.getLogger(__name__)

SILENT_S = 20.0
"""Seconds in which a peer has to take something, or to ask for the next piece."""

PIECE_S = 60.0
"""Seconds that a peer may take for one piece."""

LINGER_S = 5.0
"""Seconds without any stream after which the sender ends: it may hold a GPU's context."""

MOST_EACH = 2 * MOST_STREAMS
"""Streams of one host at a time: those that broke may not be known to be broken yet."""

MOST = 64
_LOOK_S = 0.2


def send(link: Link, mapper_of: Callable[[ToSend], Mapper], *, linger_s: float = LINGER_S) -> None:
    """Send what the rank at the other end of `link` orders, until nobody wants any more, or it
    hangs up. PreloadError if there is nothing that can be sent."""
    with ExitStack() as undo:
        packet = link.receive()
        undo.callback(packet.close)
        order = decode_order(packet.data)
        if not isinstance(order, ToSend) or len(packet.fds) != 2 + len(order.chunks):
            raise ProtocolViolation("the rank does not say first what is to be sent")
        sealed, table, *chunks = packet.fds
        manifest = read_sealed(sealed.fileno(), payload.MAX_NBYTES)
        digests = Digests(table, (*order.chunks, len(manifest)))
        undo.callback(digests.close)
        mapping = mapper_of(order).map(list(zip(chunks, order.chunks, strict=True)))
        undo.callback(mapping.close)
        streams = undo.enter_context(StreamServer(Arena(order.chunks, mapping, manifest, digests)))
        _hear(link, streams, linger_s)


def _hear(link: Link, streams: StreamServer, linger_s: float) -> None:
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < linger_s:
        with suppress(TimeoutError):
            packet = link.receive(deadline=time.monotonic() + _LOOK_S)
            if packet.eof:
                return
            _take(packet, streams)
        if streams.alive:
            quiet_since = time.monotonic()


def _take(packet: Packet, streams: StreamServer) -> None:
    with ExitStack() as undo:
        undo.callback(packet.close)
        order = decode_order(packet.data)
        if not isinstance(order, StreamOpened) or len(packet.fds) != 1:
            raise ProtocolViolation("the rank gives something else than a stream")
        streams.start(socket_of(packet.fds[0]))


class Digests(Owner):
    """Digests of all pieces, made when they are first wanted and kept for senders to come."""

    def __init__(self, table: OwnedFd, sizes: Sequence[int]) -> None:
        self._starts = [0, *accumulate(map(pieces, sizes))]
        self._table = mmap.mmap(table.fileno(), DIGEST_NBYTES * self._starts[-1])

    def of(self, chunk: int, piece: int, data: memoryview | None) -> bytes:
        """The digest of a piece, whose bytes are `data`; b'' if it is not known and there are none.

        If two threads make it at a time, they make the same.
        """
        start = DIGEST_NBYTES * (self._starts[chunk] + piece)
        known = self._table[start : start + DIGEST_NBYTES]
        if any(known):
            return known
        if data is None:
            return b""
        made = blake3(data).digest()
        self._table[start : start + DIGEST_NBYTES] = made
        return made

    def close(self) -> None:
        """Unmap the table, which the rank keeps."""
        self._table.close()


class Arena:
    """What there is to send: chunks of a borrowed mapping, and the manifest behind them."""

    def __init__(
        self, chunks: Sequence[int], mapping: Mapping, manifest: bytes, digests: Digests
    ) -> None:
        self._sizes = (*chunks, len(manifest))
        self._mapping = mapping
        self._manifest = manifest
        self._digests = digests

    def send(self, asked: PieceRequest, sink: Callable[[memoryview], object]) -> None:
        """Give `sink` the bytes asked for, then the digest of their piece. ProtocolViolation if
        there are no such."""
        last = len(self._sizes) - 1
        chunk = last if asked.chunk == MANIFEST else asked.chunk
        if asked.chunk != MANIFEST and asked.chunk >= last:
            raise ProtocolViolation(f"no chunk {asked.chunk}")
        nbytes = piece_nbytes(self._sizes[chunk], asked.piece)
        if asked.skip > nbytes:
            raise ProtocolViolation(f"no byte {asked.skip} in a piece of {nbytes}")

        def use(window: memoryview) -> None:
            with window[asked.skip :] as rest:
                sink(rest)
            sink(memoryview(self._digests.of(chunk, asked.piece, window)))

        offset = asked.piece * PIECE
        if chunk == last:
            use(memoryview(self._manifest)[offset : offset + nbytes])
        else:
            self._mapping.lend(chunk, offset, nbytes, use)


class StreamServer(Owner):
    """The connections, each with a thread of its own that answers it until it ends."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._serving: dict[socket.socket, threading.Thread] = {}
        self._hosts: dict[socket.socket, str] = {}

    @property
    def alive(self) -> int:
        """How many are served."""
        with self._lock:
            return len(self._serving)

    def start(self, sock: socket.socket) -> None:
        """Serve a connection, which is taken; one too many is hung up on. PreloadError if there is
        no thread for it."""
        with ExitStack() as undo:
            undo.callback(sock.close)
            try:
                host = str(sock.getpeername()[0])
            except OSError:
                return
            with self._lock:
                crowded = Counter(self._hosts.values())[host] >= MOST_EACH
                if crowded or len(self._serving) >= MOST:
                    log.warning("%s has too many streams: one is hung up on", host)
                    return
                thread = threading.Thread(target=self._serve, args=(sock,), name="stream")
                with starting("sending weights"):
                    thread.start()
                self._serving[sock], self._hosts[sock] = thread, host
            undo.pop_all()

    def close(self) -> None:
        """Hang up on all, and wait for the threads."""
        with self._lock:
            left = dict(self._serving)
            for sock in left:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in left.values():
            thread.join()

    def _serve(self, sock: socket.socket) -> None:
        try:
            limit(sock, SILENT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (asked := _asked(sock)) is not None:
                self._arena.send(asked, partial(_send, sock, time.monotonic() + PIECE_S))
        except (OSError, ProtocolViolation) as error:
            log.debug("a stream ended: %s", error)
        except Exception:
            log.exception("a stream was hung up on, because sending failed")
        finally:
            with self._lock:
                del self._serving[sock], self._hosts[sock]
                sock.close()


def _asked(sock: socket.socket) -> PieceRequest | None:
    """What is asked for next; None when the peer hangs up, or asks too slowly. OSError."""
    data = sock.recv(REQUEST_NBYTES, socket.MSG_WAITALL)
    return PieceRequest.decode(data) if len(data) == REQUEST_NBYTES else None


def _send(sock: socket.socket, until: float, data: memoryview) -> None:
    """Send all of it; OSError if the peer is gone, or takes it too slowly."""
    while data:
        data = data[sock.send(data) :]
        if time.monotonic() > until:
            raise TimeoutError("the peer takes it too slowly")
