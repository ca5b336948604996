"""What becomes of what a peer sends, over real sockets."""

import socket
import struct

import anyio
import pytest

from preloadd.protocol.rendezvous.frames import decode_from_convener, encode
from preloadd.protocol.rendezvous.messages import Agreed, Beat, Ended
from preloadd.rank.rendezvous.hearing import hear
from preloadd.transport.tcp import Wire

pytestmark = pytest.mark.anyio

GARBAGE = b"\0\0\0\x01\xc1"


@pytest.fixture
def ends():
    """A wire, and the socket of its peer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        wire = Wire(server.accept()[0])
    yield wire, peer
    wire.close()
    peer.close()


async def heard(wire: Wire, take) -> str:
    with anyio.fail_after(5):
        return await hear(wire, decode_from_convener, take)


async def test_messages_are_taken_in_their_order_until_the_peer_hangs_up(ends):
    wire, peer = ends
    said = [Beat(missing=(1,)), Agreed(), Ended(why="no")]
    peer.sendall(b"".join(map(encode, said)))
    peer.shutdown(socket.SHUT_WR)
    found = []
    assert await heard(wire, found.append) == "hung up"
    assert found == said


@pytest.mark.parametrize(
    ("rest", "why"),
    [(GARBAGE + encode(Beat()), "no message of a rank"), (b"\xff" * 4, "a frame of 4,294,967,295")],
)
async def test_what_breaks_the_rules_is_the_end_and_what_came_before_it_counts(ends, rest, why):
    wire, peer = ends
    peer.sendall(encode(Agreed()) + rest)
    found = []
    assert (await heard(wire, found.append)).startswith(f"broke the protocol: {why}")
    assert found == [Agreed()]


async def test_a_connection_that_is_reset_says_so(ends):
    wire, peer = ends
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    assert await heard(wire, pytest.fail) == "hung up (Connection reset by peer)"


async def test_after_the_last_word_what_comes_is_read_but_means_nothing(ends):
    wire, peer = ends
    found = []

    def take(message) -> None:
        found.append(message)
        wire.finish()

    async def go_on() -> None:
        while not wire.finished:  # noqa: ASYNC110
            await anyio.sleep(0.005)
        peer.sendall(GARBAGE)
        peer.shutdown(socket.SHUT_WR)

    async with anyio.create_task_group() as tasks:
        peer.sendall(encode(Agreed()) + encode(Beat()) + GARBAGE)
        tasks.start_soon(go_on)
        assert await heard(wire, take) == "hung up"
    assert found == [Agreed()]


async def test_what_could_not_be_sent_at_once_goes_out_meanwhile(ends):
    wire, peer = ends
    peer.settimeout(5)
    posted, read = 0, 0
    while not wire._pending:
        wire.post(bytes(1 << 18))
        posted += 1 << 18
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heard, wire, pytest.fail)
        while read < posted:
            read += len(await anyio.to_thread.run_sync(peer.recv, 1 << 16))
        peer.shutdown(socket.SHUT_WR)
