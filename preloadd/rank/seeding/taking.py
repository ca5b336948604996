"""Taking weights from a peer: asks for them in the name of a loader, and gives it the streams.

The token stays in the rank: what the loader gets are connections that were admitted already.
"""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack

import anyio

from preloadd.domain.endpoint import Endpoint
from preloadd.errors import PreloadError, ProtocolViolation
from preloadd.linux.fds import OwnedFd
from preloadd.protocol import codec
from preloadd.protocol.peering import (
    MOST_STREAMS,
    PeerAbsent,
    PeerAsked,
    PeerGiven,
    decode_asked,
)
from preloadd.rank.seeding.client import fetch
from preloadd.transport import tcp
from preloadd.transport.aio import Link
from preloadd.warmup.seeding import messages as m
from preloadd.warmup.seeding.frames import MAX_REQUEST, Frame, framed
from preloadd.warmup.seeding.weights import STREAM, Offer, WeightsWanted, stream_fields

log = logging.getLogger(__name__)

STREAM_S = 5.0
"""Seconds for opening all streams."""

MOST_S = 60.0
"""Seconds for which the peer is asked at most, whatever a loader says."""


async def serve(link: Link, source: Endpoint, token: str) -> None:
    """Ask `source` whenever the loader at the other end wants it, until that hangs up."""
    while True:
        try:
            packet = await link.receive()
            packet.close()
            if packet.eof:
                return
            await _answer(link, source, token, decode_asked(packet.data))
        except (PreloadError, OSError) as error:
            # What is left of it is the loader's to find out: it goes on with the disk.
            log.warning("the loader gets no streams to a peer: %s", error)
            return


async def _answer(link: Link, source: Endpoint, token: str, asked: PeerAsked) -> None:
    """OSError if the loader is gone, or this process may open no more sockets."""
    within = min(max(asked.within, 0.0), MOST_S)
    seeded = await fetch(source, WeightsWanted(asked.key), token, within=within)
    if seeded.value is None:
        await link.send(codec.encode(PeerAbsent(why=seeded.why)))
        return
    offer = seeded.value
    with ExitStack() as undo:
        streams = await _opened(source, token, offer, min(asked.streams, MOST_STREAMS))
        for stream in streams:
            undo.callback(stream.close)
        if not streams:
            await link.send(codec.encode(PeerAbsent(why=f"{source}: it opens no streams")))
            return
        given = PeerGiven(generation=offer.generation, manifest=offer.manifest, chunks=offer.chunks)
        copies = [OwnedFd.copy_of(stream.fileno()) for stream in streams]
        for copy in copies:
            undo.callback(copy.close)
        await link.send(codec.encode(given), copies)


async def _opened(source: Endpoint, token: str, offer: Offer, count: int) -> list[socket.socket]:
    """Up to `count` connections that the source has admitted, the caller's to close."""
    opened: list[socket.socket] = []
    body = framed(m.request(STREAM, stream_fields(offer.ticket), token))

    async def open_one() -> None:
        try:
            opened.append(await _admitted(source, body))
        except (OSError, ProtocolViolation) as error:
            # Without the source's own words.
            log.info("%s opens no stream: %s", source, getattr(error, "strerror", error))

    with anyio.move_on_after(STREAM_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(open_one)
    return opened


async def _admitted(source: Endpoint, body: bytes) -> socket.socket:
    """OSError if it cannot be reached or hangs up, ProtocolViolation if it does not admit us."""
    wire = await tcp.connect(source.host, source.port)
    with ExitStack() as undo:
        undo.callback(wire.close)
        await wire.send(body)
        # Nothing follows before something is asked for, so that nothing of it is lost here.
        frame = Frame(MAX_REQUEST)
        while data := await wire.receive():
            raw = frame.receive(data)
            if raw is None:
                continue
            if m.parse_answer(raw).status is not m.Status.OK:
                raise ProtocolViolation("it does not admit this rank")
            undo.pop_all()
            return wire.take()
    raise ConnectionResetError(0, "it hung up")
