"""Streams to a peer that sends an arena, for several threads at once.

What comes is written where it belongs and digested while it is still in the processor's cache. A
stream that breaks, or stalls, is given up, and what it had not brought is asked for over another,
from the byte on where it ended. Nothing is believed but what has the digest that came with it; that
tells of damage on the way, not of a source that lies.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

from blake3 import blake3

from preloadd.errors import ErrorCode, PreloadError
from preloadd.linux.owner import Owner
from preloadd.linux.waits import limit
from preloadd.protocol.peering import DIGEST_NBYTES, MANIFEST, PieceRequest

log = logging.getLogger(__name__)

SILENT_S = 10.0
"""Seconds without a byte after which a stream is given up."""

PIECE_S = 60.0
"""Seconds that a piece may take over one stream."""

ROUNDS = 3
"""How often streams are asked for: a source that was restarted has closed all there were."""

MOST_DAMAGED = 4
"""Pieces that may have come damaged before nothing more is taken."""

_PART = 1 << 20

More = Callable[[], Sequence[socket.socket]]
"""Opens further streams to the same weights. PeerLost if there are none to be had."""


class PeerLost(PreloadError):
    """The peer does not bring the weights; the text says why. They are to be had from the disk."""

    code: ClassVar[ErrorCode] = ErrorCode.UNAVAILABLE


class _Piece:
    """A piece on its way: how much of it is there."""

    def __init__(self, chunk: int, piece: int, buffer: memoryview) -> None:
        self.chunk, self.piece, self.buffer = chunk, piece, buffer
        self.begin()

    def begin(self) -> None:
        self.done = 0
        self.trailer = bytearray()
        self.hasher = blake3()

    @property
    def whole(self) -> bool:
        return self.done == len(self.buffer) and len(self.trailer) == DIGEST_NBYTES

    @property
    def intact(self) -> bool:
        return self.hasher.digest() == self.trailer


class Streams(Owner):
    """Connected sockets that it owns, each used by one thread at a time. `lost` counts broken ones,
    `damaged` pieces that had to be asked for again."""

    def __init__(self, more: More) -> None:
        self.lost = 0
        self.damaged = 0
        self._more = more
        self._rounds = 0
        self._idle: deque[socket.socket] = deque()
        self._all: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._settled = 0
        self._flying: set[_Piece] = set()

    @property
    def received(self) -> int:
        """Bytes of pieces of chunks that have come, also of those on their way."""
        with self._changed:
            return self._settled + sum(wanted.done for wanted in self._flying)

    def open(self) -> int:
        """Open the first streams; how many there are. PeerLost."""
        with self._changed:
            self._open()
            return len(self._all)

    def fetch(self, chunk: int, piece: int, buffer: memoryview, *, until: float = math.inf) -> None:
        """Fill `buffer` with a whole piece, which is exactly as long. PeerLost, also where it is
        not there `until` then, by the monotonic clock."""
        with self._counting(_Piece(chunk, piece, buffer)) as wanted:
            while _left(until):
                sock = self._take()
                try:
                    limit(sock, min(SILENT_S, _left(until)))
                    _receive(sock, wanted, until)
                except OSError as error:
                    self._give_up(sock, error)
                    continue
                except BaseException:
                    self._give_up(sock, None)
                    raise
                self._give_back(sock)
                if wanted.intact:
                    return
                self._count_damage(chunk, piece)
                wanted.begin()

    def close(self) -> None:
        """Hang up on all; threads that wait for them get PeerLost."""
        with self._changed:
            self._closed = True
            for sock in self._all:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for sock in self._idle:
                sock.close()
            self._all.difference_update(self._idle)
            self._idle.clear()
            self._changed.notify_all()

    @contextmanager
    def _counting(self, wanted: _Piece) -> Iterator[_Piece]:
        with self._changed:
            self._flying.add(wanted)
        try:
            yield wanted
        finally:
            with self._changed:
                self._flying.discard(wanted)
                if wanted.chunk != MANIFEST:
                    self._settled += wanted.done

    def _take(self) -> socket.socket:
        with self._changed:
            while not self._idle:
                if self._closed:
                    raise PeerLost("it was given up")
                if self._all:
                    self._changed.wait()
                else:
                    self._open()
            return self._idle.popleft()

    def _open(self) -> None:
        """More streams, where there are none; the others wait for this one."""
        if self._rounds == ROUNDS:
            raise PeerLost(f"all streams broke, {ROUNDS} times")
        self._rounds += 1
        for sock in self._more():
            self._all.add(sock)
            self._idle.append(sock)
        if not self._all:
            raise PeerLost("it gives no streams")
        self._changed.notify_all()

    def _give_back(self, sock: socket.socket) -> None:
        with self._changed:
            if self._closed:
                self._all.discard(sock)
                sock.close()
                return
            self._idle.append(sock)
            self._changed.notify()

    def _give_up(self, sock: socket.socket, error: OSError | None) -> None:
        with self._changed:
            self._all.discard(sock)
            sock.close()
            self._changed.notify_all()
            if error is not None and not self._closed:
                self.lost += 1
                log.info("a stream broke: %s", error.strerror or error)

    def _count_damage(self, chunk: int, piece: int) -> None:
        with self._changed:
            self.damaged += 1
            many = self.damaged >= MOST_DAMAGED
        log.warning("piece %d of chunk %d came damaged", piece, chunk)
        if many:
            raise PeerLost(f"{MOST_DAMAGED} pieces came damaged: see the network between the hosts")


def _left(until: float) -> float:
    """Seconds until then, more than none, which would stand for ever; PeerLost if it has passed."""
    left = until - time.monotonic()
    if left <= 0:
        raise PeerLost("it sends too slowly")
    return max(left, 0.001)


def _receive(sock: socket.socket, wanted: _Piece, until: float) -> None:
    """Receive what is missing of a piece; OSError if it does not come, with all that did kept."""
    sock.sendall(PieceRequest(wanted.chunk, wanted.piece, wanted.done).encode())
    # The digest comes anew, whatever of it is there.
    wanted.trailer.clear()
    until = min(until, time.monotonic() + PIECE_S)
    size = len(wanted.buffer)
    while not wanted.whole:
        if time.monotonic() > until:
            raise TimeoutError("a piece takes too long")
        if wanted.done < size:
            end = min(wanted.done + _PART, size)
            with wanted.buffer[wanted.done : end] as window:
                count = sock.recv_into(window, 0, socket.MSG_WAITALL)
                with window[:count] as came:
                    wanted.hasher.update(came)
            wanted.done += count
        else:
            rest = sock.recv(DIGEST_NBYTES - len(wanted.trailer))
            count = len(rest)
            wanted.trailer += rest
        if not count:
            raise ConnectionResetError(0, "the peer hung up")
