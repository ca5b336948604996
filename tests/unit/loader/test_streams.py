"""Streams to a peer, whose end is played here by real sockets and threads."""

import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from blake3 import blake3

from preloadd.loader import streams as of
from preloadd.loader.streams import PeerLost, Streams
from preloadd.protocol.peering import MANIFEST, REQUEST_NBYTES, PieceRequest

DATA = bytes(range(256)) * 12000
DIGEST = blake3(DATA).digest()


def honest(place, sock):
    sock.sendall(DATA[place.skip :] + DIGEST)


@pytest.fixture
def peer():
    """Makes streams, and answers on each as its script says, until that ends."""
    with ExitStack() as threads, ExitStack() as undo:
        asked = []

        def answer(sock, script):
            with sock:
                for say in script:
                    data = sock.recv(REQUEST_NBYTES, socket.MSG_WAITALL)
                    if not data:
                        return
                    asked.append(PieceRequest.decode(data))
                    say(asked[-1], sock)

        def connected(script):
            ours, theirs = socket.socketpair()
            thread = threading.Thread(target=answer, args=(theirs, script))
            thread.start()
            threads.callback(thread.join)
            return ours

        def peer(*rounds):
            left = list(rounds)

            def more():
                if not left:
                    raise PeerLost("it is gone")
                return [connected(script) for script in left.pop(0)]

            streams = Streams(more)
            undo.callback(streams.close)
            streams.asked = asked
            return streams

        yield peer


def fetched(streams, chunk=0):
    buffer = bytearray(len(DATA))
    with memoryview(buffer) as view:
        streams.fetch(chunk, 3, view)
    return bytes(buffer)


def half(place, sock):
    sock.sendall(DATA[place.skip : 1 << 20])
    sock.shutdown(socket.SHUT_RDWR)


def without_digest(place, sock):
    sock.sendall(DATA[place.skip :] + DIGEST[:7])
    sock.shutdown(socket.SHUT_RDWR)


def damaged(place, sock):
    sock.sendall(DATA[place.skip : -1] + b"\0" + DIGEST)


def silent(place, sock):
    sock.recv(1)


def test_a_piece_comes_whole(peer):
    streams = peer([[honest, honest]])
    assert streams.open() == 1
    assert [fetched(streams, 5), fetched(streams)] == [DATA, DATA]
    assert streams.asked == [PieceRequest(5, 3, 0), PieceRequest(0, 3, 0)]
    assert streams.received == 2 * len(DATA)


def test_the_manifest_is_not_counted(peer):
    streams = peer([[honest]])
    assert fetched(streams, MANIFEST) == DATA
    assert streams.received == 0


def test_what_broke_off_goes_on_where_it_ended(peer):
    streams = peer([[half], [honest]])
    assert fetched(streams) == DATA
    assert streams.asked == [PieceRequest(0, 3, 0), PieceRequest(0, 3, 1 << 20)]
    assert (streams.lost, streams.damaged) == (1, 0)


def test_a_digest_that_broke_off_comes_again(peer):
    streams = peer([[without_digest], [honest]])
    assert fetched(streams) == DATA
    assert streams.asked[-1] == PieceRequest(0, 3, len(DATA))


def test_further_streams_are_opened_when_all_are_broken(peer):
    streams = peer([[half]], [[honest]])
    assert fetched(streams) == DATA


def test_but_not_for_ever(peer):
    streams = peer(*[[[half]]] * 9)
    with pytest.raises(PeerLost, match="all streams broke, 3 times"):
        fetched(streams)


def test_a_peer_that_is_gone_is_said(peer):
    with pytest.raises(PeerLost, match="it is gone"):
        fetched(peer([[half]]))
    with pytest.raises(PeerLost, match="it gives no streams"):
        fetched(peer([]))


def test_what_is_damaged_comes_again(peer):
    streams = peer([[damaged, honest]])
    assert fetched(streams) == DATA
    assert streams.damaged == 1


def test_where_much_is_damaged_nothing_is_taken(peer):
    with pytest.raises(PeerLost, match="4 pieces came damaged"):
        fetched(peer([[damaged] * 9]))


def test_a_silent_stream_is_given_up(peer, monkeypatch):
    monkeypatch.setattr(of, "SILENT_S", 0.05)
    streams = peer([[silent], [honest]])
    assert fetched(streams) == DATA
    assert streams.lost == 1


def test_one_that_drips_is_given_up(peer, monkeypatch):
    monkeypatch.setattr(of, "SILENT_S", 0.02)
    monkeypatch.setattr(of, "PIECE_S", 0.1)
    stopped = threading.Event()

    def drip(place, sock):
        for start in range(place.skip, len(DATA), 100):
            if stopped.wait(0.005):
                return
            try:
                sock.sendall(DATA[start : start + 100])
            except OSError:
                return

    streams = peer([[drip], [honest]])
    assert fetched(streams) == DATA
    stopped.set()
    assert streams.lost == 1


def test_threads_wait_for_the_one_stream(peer):
    streams = peer([[honest] * 8])
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetched(streams))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DATA] * 8


def test_closing_ends_what_is_under_way(peer):
    streams = peer([[silent]])
    raised = []

    def fetch():
        try:
            fetched(streams)
        except PeerLost as error:
            raised.append(str(error))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not streams.asked:
        pass
    streams.close()
    for thread in threads:
        thread.join()
    assert raised == ["it was given up"] * 2


def test_what_is_due_is_not_waited_for_beyond(peer):
    streams = peer([[silent]], [[silent]], [[silent]])
    begun = time.monotonic()
    with pytest.raises(PeerLost, match="too slowly"):
        streams.fetch(MANIFEST, 0, memoryview(bytearray(8)), until=begun + 0.1)
    assert time.monotonic() - begun < 1
    assert len(streams.asked) == 1


def test_what_drips_is_not_waited_for_beyond_what_is_due(peer):
    def drip(place, sock):
        with suppress(OSError):
            while not stopped.wait(0.01):
                sock.sendall(b"x")

    stopped = threading.Event()
    streams = peer([[drip]])
    begun = time.monotonic()
    with pytest.raises(PeerLost, match="too slowly"):
        streams.fetch(MANIFEST, 0, memoryview(bytearray(1 << 20)), until=begun + 0.1)
    stopped.set()
    assert time.monotonic() - begun < 1
