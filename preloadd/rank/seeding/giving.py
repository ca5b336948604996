"""Giving weights to peers: what a rank with weights offers, and the process that sends them.

The rank maps nothing and knows no GPU, so the bytes are sent by a sender, which is a loader of
another kind: started when the first stream is opened, given copies of the descriptors, and gone
soon after the last one has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup

from preloadd.domain.settings import RankSettings
from preloadd.errors import ProtocolViolation
from preloadd.linux import memfd, seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.process import Child, spawn
from preloadd.protocol import codec
from preloadd.protocol.messages import LINK
from preloadd.protocol.peering import MOST_STREAMS, StreamOpened, ToSend, table_nbytes
from preloadd.rank.generation import Generation
from preloadd.transport.aio import Link
from preloadd.warmup.seeding.weights import (
    NO_TICKET,
    STREAM,
    Held,
    Tickets,
    WeightsKind,
    digest_of,
    ticket_in,
)

log = logging.getLogger(__name__)

SEND = "send"
"""The argument that makes a loader a sender."""


class Giving:
    """The weights of one rank, for peers. `argv` and `environ` are those of its loaders.

    `kind` goes to the listener, and this itself is its stream. `work` has to run meanwhile.
    """

    def __init__(
        self,
        settings: RankSettings,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._argv = (*argv, SEND)
        self._environ = environ
        self._clock = clock
        self._tickets = Tickets(MOST_STREAMS)
        self._offer: _Offered | None = None
        self._sender: _Sender | None = None
        self._reaping: TaskGroup | None = None
        self._starting = anyio.Lock()
        self.kind = WeightsKind(self._held, self._tickets, clock)

    @property
    def name(self) -> str:
        """As requests for streams name it."""
        return STREAM

    def offer(self, generation: Generation) -> None:
        """From now on give this generation, borrowed until `withdraw`.

        Never an error: weights that cannot be given to others are good all the same.
        """
        self.withdraw()
        manifest = generation.manifest
        nbytes = os.fstat(generation.sealed.fileno()).st_size
        try:
            table = _table(table_nbytes((*manifest.chunks, nbytes)))
        except OSError as error:
            log.warning("these weights are not given to others: %s", error.strerror)
            return
        held = Held(manifest.generation, digest_of(manifest.key), nbytes, manifest.chunks)
        self._offer = _Offered(held, generation, table)

    def withdraw(self) -> None:
        """Give nothing any more: what is being sent ends, and the sender with it."""
        self._tickets.withdraw()
        if self._sender is not None:
            self._sender.child.signal(signal.SIGKILL)
        if self._offer is not None:
            self._offer.table.close()
            self._offer = None

    def admit(self, fields: Mapping[str, object]) -> None:
        """ProtocolViolation unless the ticket is good for one more stream."""
        if not self._tickets.redeem(ticket_in(fields), now=self._clock()):
            raise ProtocolViolation(NO_TICKET)

    async def take(self, sock: socket.socket) -> None:
        """Have the sender go on with a stream; starts one if there is none. OSError."""
        async with self._starting:
            if self._offer is None or self._reaping is None:
                return
            sender = self._sender
            if sender is None or sender.child.poll() is not None:
                sender = await self._start(self._offer, self._reaping)
            with OwnedFd.copy_of(sock.fileno()) as copy:
                await sender.link.send(codec.encode(StreamOpened()), [copy])

    async def work(self) -> None:
        """Look after senders until cancelled; then none is left."""
        async with anyio.create_task_group() as tasks:
            self._reaping = tasks
            try:
                await anyio.sleep_forever()
            finally:
                self._reaping = None

    async def _start(self, offer: _Offered, reaping: TaskGroup) -> _Sender:
        settings, held, generation = self._settings, offer.held, offer.generation
        order = ToSend(
            memory=settings.model.memory,
            device=settings.parsed_instance.device,
            manifest=held.manifest,
            chunks=held.chunks,
        )
        with ExitStack() as given:
            # Copies, since all may be withdrawn while a sender that starts takes them.
            lent = (generation.sealed, offer.table, *generation.chunks)
            fds = [given.enter_context(fd.duplicate()) for fd in lent]
            self._sender = sender = _Sender.started(self._argv, self._environ)
            reaping.start_soon(self._reap, sender)
            await sender.link.send(codec.encode(order), fds)
        log.info("a sender was started (pid %d)", sender.child.pid)
        return sender

    async def _reap(self, sender: _Sender) -> None:
        try:
            await anyio.wait_readable(sender.child)
        finally:
            sender.close()
            if self._sender is sender:
                self._sender = None

    def _held(self) -> Held | None:
        # Called in threads.
        offer = self._offer
        return offer.held if offer is not None else None


def _table(nbytes: int) -> OwnedFd:
    """A table of digests, none of which is known yet."""
    with ExitStack() as undo:
        table = undo.enter_context(memfd.create("preloadd-digests"))
        os.ftruncate(table.fileno(), nbytes)
        undo.pop_all()
    return table


@dataclass(frozen=True, slots=True)
class _Offered:
    """What is given: sizes, the borrowed generation, and the table of digests, which is ours."""

    held: Held
    generation: Generation
    table: OwnedFd


@dataclass(frozen=True, slots=True)
class _Sender:
    """A sender's process and the link to it."""

    child: Child
    link: Link

    @classmethod
    def started(cls, argv: Sequence[str], environ: Mapping[str, str]) -> _Sender:
        ours, theirs = seqpacket.pair()
        with ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                child = spawn(
                    argv,
                    environ=environ,
                    fds=[(LINK, theirs.fileno())],
                    parent_death_signal=signal.SIGKILL,
                )
            undo.pop_all()
        return cls(child, Link(ours))

    def close(self) -> None:
        self.link.close()
        self.child.close()
