"""Filling an arena from a peer's, which has the very same weights, where that is faster.

Nothing that comes from the peer is believed: its manifest has to be one, with the key that was
computed here and the layout that is expected here, before a byte is taken. Whatever goes wrong with
the peer, what was filled is freed again, and the weights come from the disk.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue

from preloadd.domain.key import Key
from preloadd.domain.manifest import Manifest
from preloadd.domain.recipe import LAYOUT
from preloadd.errors import DamagedManifest, ProtocolViolation, ReadFailed
from preloadd.linux.owner import Owner
from preloadd.linux.seqpacket import socket_of
from preloadd.linux.threads import starting
from preloadd.loader.filling import Filled
from preloadd.loader.native import Native
from preloadd.loader.race import Rule, disk_pace
from preloadd.loader.report import Reporter, Tally
from preloadd.loader.streams import PeerLost, Streams
from preloadd.memory.api import Filler, Rows, WritableChunk
from preloadd.protocol import codec, payload
from preloadd.protocol.peering import (
    MANIFEST,
    MOST_STREAMS,
    PIECE,
    PeerAbsent,
    PeerAsked,
    PeerGiven,
    decode_told,
    piece_nbytes,
    pieces,
)
from preloadd.transport.blocking import Link
from preloadd.warmup.seeding.weights import digest_of
from preloadd.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)

SEEDING = "seeding"
"""The phase in which weights come from a peer."""

_LEAST_STREAMS = 4
"""One connection brings no more than one of the source's processors sends."""

MANIFEST_S = 10.0
"""Seconds for the manifest, once there are streams: nothing tells the rank of progress before."""

_LOOK_S = 0.1
_SLACK_S = 10.0
"""Seconds that the rank may take longer than it was told: it has its own deadlines."""

Fits = Callable[[Manifest], None]
"""PeerLost unless a manifest describes what would be loaded here."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How a loader reaches the peer of its rank: by asking the rank, over a borrowed link."""

    link: Link
    rule: Rule = field(default_factory=Rule)


def fill_native(
    peer: Peer, native: Native, key: Key, filler: Filler, reporter: Reporter
) -> Filled | None:
    """As `filling.fill`, from the peer; None, and nothing of it left, if the disk is to do it."""

    def fits(manifest: Manifest) -> None:
        plan = native.plan
        ours = (plan.chunks, plan.storages, plan.tensors)
        if (manifest.chunks, manifest.storages, manifest.tensors) != ours:
            raise PeerLost("its arena is laid out otherwise: use the same memory and chunk size")

    wanted = Want(key, native.plan.arena_nbytes, pace_of(native.checkpoint, filler), fits)
    found = fill(peer, wanted, filler, reporter)
    return found[1] if found else None


def pace_of(checkpoint: Checkpoint, filler: Filler) -> float:
    """Bytes a second that a load reads of the checkpoint's files; 0 if the disk does not do it."""
    try:
        return disk_pace(checkpoint.shards, threads=filler.threads, direct=filler.staged)
    except ReadFailed as error:
        log.warning("the disk is ill: %s", error)
        return 0.0


@dataclass(frozen=True, slots=True)
class Want:
    """What is wanted: weights with this `key`, of about `nbytes`, in an arena that `fits`, sooner
    than at the pace of the `disk`."""

    key: Key
    nbytes: int
    disk: float
    fits: Fits


def fill(
    peer: Peer, wanted: Want, filler: Filler, reporter: Reporter
) -> tuple[Manifest, Filled] | None:
    """Fill chunks from the peer and hand them over; the manifest that describes them, the peer's
    own. None if it cannot or is not to be: then nothing was handed over, and nothing is left.

    PreloadError for what is wrong here: no room, a broken device.
    """
    if not peer.rule.asks(wanted.nbytes, wanted.disk):
        log.info("the disk gives %.2f GB/s: no peer is asked", wanted.disk / 1e9)
        return None
    reporter.progress(SEEDING)
    try:
        with _Asking(peer, wanted, filler) as asking:
            manifest = asking.manifest()
            _require(manifest, wanted.key, filler)
            wanted.fits(manifest)
            look = _Look(asking.streams, manifest, peer.rule, wanted.disk, reporter)
            return manifest, _filled(asking.streams, manifest, filler, reporter, look)
    except PeerLost as error:
        log.warning("no weights from a peer, they are read from the disk: %s", error)
        return None


def _require(manifest: Manifest, key: Key, filler: Filler) -> None:
    if manifest.key != key or manifest.layout != LAYOUT:
        raise PeerLost("its manifest is of other weights")
    if any(nbytes % filler.granularity for nbytes in manifest.chunks):
        raise PeerLost("its chunks are not such as this memory has")


class _Asking(Owner):
    """The peer, as one generation of it is asked for: by the rank, and then over streams."""

    def __init__(self, peer: Peer, wanted: Want, filler: Filler) -> None:
        self._link = peer.link
        self._asked = PeerAsked(
            key=digest_of(wanted.key),
            streams=min(max(filler.threads, _LEAST_STREAMS), MOST_STREAMS),
            within=peer.rule.patience_s(wanted.nbytes, wanted.disk),
        )
        self._given: PeerGiven | None = None
        self._most_s = peer.rule.most_s(wanted.nbytes, wanted.disk)
        self._until = math.inf
        self.streams = Streams(self._more)

    def manifest(self) -> Manifest:
        """The peer's manifest, checked as any is. PeerLost, also if it does not come soon."""
        self.streams.open()
        self._until = time.monotonic() + MANIFEST_S
        given = self._given
        if given is None or given.manifest > payload.MAX_NBYTES:
            raise PeerLost("its manifest is larger than any")
        encoded = bytearray(given.manifest)
        with memoryview(encoded) as whole:
            for piece in range(pieces(given.manifest)):
                start = piece * PIECE
                with whole[start : start + piece_nbytes(given.manifest, piece)] as window:
                    self.streams.fetch(MANIFEST, piece, window, until=self._until)
        # Nobody looks how fast it is while streams are asked for.
        self._until = time.monotonic() + self._most_s
        try:
            manifest = payload.decode(encoded)
        except DamagedManifest as error:
            raise PeerLost(str(error)) from error
        if (manifest.generation, manifest.chunks) != (given.generation, given.chunks):
            raise PeerLost("its manifest is not that of what it offers")
        return manifest

    def close(self) -> None:
        """Hang up on the peer."""
        self.streams.close()

    def _more(self) -> Sequence[socket.socket]:
        """Have the rank open streams to the generation that was given first, if any was."""
        try:
            self._link.send(codec.encode(self._asked))
            due = time.monotonic() + self._asked.within + _SLACK_S
            packet = self._link.receive(deadline=min(due, self._until))
            with ExitStack() as undo:
                undo.callback(packet.close)
                if packet.eof:
                    raise PeerLost("the rank asks no peer")
                told = decode_told(packet.data)
                if isinstance(told, PeerAbsent):
                    raise PeerLost(told.why)
                if self._given is not None and told != self._given:
                    raise PeerLost("it has other weights by now")
                self._given = told
                streams = [undo.enter_context(socket_of(fd)) for fd in packet.fds]
                undo.pop_all()
                return streams
        except (OSError, ProtocolViolation) as error:
            raise PeerLost(f"the rank could not ask: {error}") from error


def _filled(
    streams: Streams, manifest: Manifest, filler: Filler, reporter: Reporter, look: _Look
) -> Filled:
    """Make all chunks, fill them, and hand them over once all are as they were sent. PeerLost."""
    with ExitStack() as undo:
        # As where files are read: unmapped after the threads, and all at the end.
        chunks = undo.enter_context(ExitStack())
        workers = undo.enter_context(_Workers(streams, filler.threads, filler.writing))
        made: list[WritableChunk] = []
        for index, nbytes in enumerate(manifest.chunks):
            made.append(chunks.enter_context(filler.create(nbytes)))
            workers.start(index, made[-1])
            workers.check(look)
        workers.wait(look)
        for index, chunk in enumerate(made):
            chunk.finish()
            reporter.chunk(index, chunk)
        log.info("a peer sent %.2f GiB in %.2f s", look.total / 2**30, look.seconds)
        return Filled(0, 0, look.seconds, bytes_peer=look.total)


class _Look:
    """A look at how fast `total` bytes come. Tells it, and ends what is too slow."""

    def __init__(
        self, streams: Streams, manifest: Manifest, rule: Rule, disk: float, reporter: Reporter
    ) -> None:
        self.total = sum(manifest.chunks)
        self._streams, self._rule, self._disk = streams, rule, disk
        self._told = Tally(reporter, SEEDING, self.total)
        self._came = 0
        self._started = 0.0

    @property
    def seconds(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._started

    def __call__(self) -> None:
        """PeerLost if the disk is to do it."""
        # The first chunk is there, and so the threads have something to do.
        self._started = self._started or time.monotonic()
        came = self._streams.received
        self._told(came - self._came)
        self._came = came
        if not self._rule.keeps(self.total, self._disk, came=came, seconds=self.seconds):
            pace = came / self.seconds
            raise PeerLost(f"it sends {pace / 1e9:.2f} GB/s, the disk {self._disk / 1e9:.2f} GB/s")


class _Workers(Owner):
    """Threads that fill chunks piece by piece, each in a block of `writing`."""

    def __init__(
        self,
        streams: Streams,
        threads: int,
        writing: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._streams = streams
        self._writing = writing
        self._work: SimpleQueue[tuple[int, WritableChunk, int] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._left = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        with ExitStack() as undo, starting("receiving weights"):
            undo.callback(self.close)
            for number in range(max(threads, _LEAST_STREAMS)):
                thread = threading.Thread(target=self._serve, name=f"receiver-{number}")
                thread.start()
                self._threads.append(thread)
            undo.pop_all()

    def start(self, index: int, chunk: WritableChunk) -> None:
        """Have a chunk filled, which is borrowed until `wait` or `close`."""
        count = pieces(chunk.nbytes)
        with self._changed:
            self._left += count
        for piece in range(count):
            self._work.put((index, chunk, piece))

    def check(self, look: Callable[[], None]) -> None:
        """Raise what went wrong so far, here or by `look`."""
        with self._changed:
            error = self._error
        if error is not None:
            raise error
        look()

    def wait(self, look: Callable[[], None]) -> None:
        """Until all is there that was started, with a `look` now and then."""
        ended = False
        while not ended:
            with self._changed:
                ended = self._changed.wait_for(
                    lambda: self._error is not None or not self._left, _LOOK_S
                )
            self.check(look)

    def close(self) -> None:
        """Begin nothing else, hang up on the peer, and wait for the threads."""
        self._stopped = True
        self._streams.close()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        try:
            with self._writing():
                self._work_off()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            with self._changed:
                self._error = self._error or error
                self._stopped = True
                self._changed.notify_all()

    def _work_off(self) -> None:
        while (given := self._work.get()) is not None:
            if self._stopped:
                continue
            index, chunk, piece = given
            nbytes = piece_nbytes(chunk.nbytes, piece)

            def read(buffer: memoryview, index: int = index, piece: int = piece) -> None:
                self._streams.fetch(index, piece, buffer)

            chunk.write(piece * PIECE, nbytes, Rows(0, nbytes), read)
            with self._changed:
                self._left -= 1
                if not self._left:
                    self._changed.notify_all()
