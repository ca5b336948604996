"""What a rank does for a loader that asks for a peer, with sources of every kind."""

import json
import socket
from contextlib import ExitStack, closing, suppress

import anyio
import pytest

from preloadd.domain.endpoint import Endpoint
from preloadd.linux import seqpacket
from preloadd.protocol import codec
from preloadd.protocol.peering import MOST_STREAMS, PeerAbsent, PeerAsked, PeerGiven, decode_told
from preloadd.rank.seeding import taking
from preloadd.transport.aio import Link
from preloadd.warmup.seeding import messages as m
from preloadd.warmup.seeding.frames import HEAD, framed
from tests.unit.rank.seeding.source import HERE, SECRET

pytestmark = pytest.mark.anyio

OFFER = m.found(
    json.dumps({"generation": "0a", "manifest": 9, "chunks": [4096], "ticket": "0b"}).encode()
)
ASKED = PeerAsked(key="ab" * 32, streams=3, within=0.5)


class Source:
    """Answers one request after the other; `asked` are those, as JSON."""

    def __init__(self, port, answers):
        self.where = Endpoint(HERE, port)
        self.asked = []
        self._port, self._answers = port, list(answers)

    async def serve(self):
        listener = await anyio.create_tcp_listener(local_host=HERE, local_port=self._port)
        async with listener, anyio.create_task_group() as tasks:
            await listener.serve(self._answer, tasks)

    async def _answer(self, stream):
        async with stream:
            raw = await stream.receive()
            self.asked.append(json.loads(raw[HEAD:]))
            await stream.send(framed(self._answers.pop(0)))
            with anyio.move_on_after(2), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.receive()


@pytest.fixture
def told(port):
    """What a loader is told that asks for a peer with these answers, and what the source heard."""

    async def told(*answers, asked=ASKED):
        source = Source(port, answers)
        ours, theirs = seqpacket.pair()
        with closing(Link(ours)) as rank, closing(Link(theirs)) as loader, ExitStack() as undo:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source.serve)
                tasks.start_soon(taking.serve, rank, source.where, SECRET)
                await loader.send(codec.encode(asked))
                packet = await loader.receive()
                undo.callback(packet.close)
                tasks.cancel_scope.cancel()
            for fd in packet.fds:
                with socket.socket(fileno=fd.take()) as sock:
                    assert sock.type is socket.SOCK_STREAM
            return decode_told(packet.data), len(packet.fds), source.asked

    return told


async def test_a_loader_gets_streams_that_were_admitted(told):
    said, streams, asked = await told(OFFER, *[m.found(b"null")] * 3)
    assert said == PeerGiven(generation="0a", manifest=9, chunks=(4096,))
    assert streams == 3
    assert [one["kind"] for one in asked] == ["weights"] + ["weights_stream"] * 3
    assert {one["token"] for one in asked} == {SECRET}
    assert [one.get("ticket") for one in asked] == [None, "0b", "0b", "0b"]


async def test_fewer_streams_will_do(told):
    _, streams, _ = await told(OFFER, m.found(b"null"), m.failed("no"), m.found(b"null"))
    assert streams == 2


async def test_no_stream_at_all_is_said(told):
    said, streams, _ = await told(OFFER, *[m.failed("no")] * 3)
    assert isinstance(said, PeerAbsent)
    assert "it opens no streams" in said.why
    assert streams == 0


async def test_a_source_without_these_weights_is_said(told):
    said, _, _ = await told(m.missed())
    assert isinstance(said, PeerAbsent)
    assert "it has none" in said.why


async def test_no_more_streams_are_opened_than_are_given(told):
    asked = PeerAsked(key="ab" * 32, streams=1000, within=0.5)
    _, streams, heard = await told(OFFER, *[m.found(b"null")] * 1000, asked=asked)
    assert streams == MOST_STREAMS
    assert len(heard) == MOST_STREAMS + 1


async def test_a_loader_that_says_something_else_is_hung_up_on(port, caplog):
    ours, theirs = seqpacket.pair()
    with closing(Link(ours)) as rank, closing(Link(theirs)) as loader:
        await loader.send(b"noise")
        with anyio.fail_after(5):
            await taking.serve(rank, Endpoint(HERE, port), SECRET)
    assert "the loader gets no streams to a peer" in caplog.text
    assert SECRET not in caplog.text


async def test_it_ends_with_its_loader(port):
    ours, theirs = seqpacket.pair()
    with closing(Link(ours)) as rank:
        theirs.close()
        with anyio.fail_after(5):
            await taking.serve(rank, Endpoint(HERE, port), SECRET)
