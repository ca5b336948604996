"""The sender, with a rank's end of its link and peers that are real sockets."""

import logging
import os
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest
from blake3 import blake3

from preloadd.domain.settings import Memory
from preloadd.errors import DamagedManifest, ProtocolViolation
from preloadd.linux import memfd, seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.loader import sending as of
from preloadd.loader.sending import send
from preloadd.memory.api import Rows
from preloadd.memory.host import HostFiller, HostKeeper, HostMapper
from preloadd.memory.vmm import VmmMapper
from preloadd.protocol import codec
from preloadd.protocol.peering import (
    DIGEST_NBYTES,
    MANIFEST,
    PIECE,
    PieceRequest,
    StreamOpened,
    ToSend,
    table_nbytes,
)
from preloadd.transport.blocking import Link

NBYTES = PIECE + 8192
DATA = os.urandom(8192) * (NBYTES // 8192)
WORD = b"a manifest, for all a sender knows"


def filled(filler):
    with filler.create(NBYTES) as chunk:
        for start in range(0, NBYTES, PIECE):
            part = DATA[start : start + PIECE]

            def put(view, part=part):
                view[:] = part

            chunk.write(start, len(part), Rows(0, len(part)), put)
        chunk.finish()
        return chunk.fd.duplicate()


class Rank:
    """The rank of a sender that runs in a thread of this process."""

    def __init__(self, chunk, mapper=HostMapper, linger_s=5.0):
        ours, theirs = seqpacket.pair()
        self.link = Link(ours)
        self.raised = []
        self._chunk = chunk
        self.table = memfd.create("table")
        os.ftruncate(self.table.fileno(), table_nbytes([NBYTES, len(WORD)]))
        self._thread = threading.Thread(target=self._run, args=(theirs, mapper, linger_s))
        self._thread.start()

    def _run(self, theirs, mapper, linger_s):
        with closing(Link(theirs)) as link:
            try:
                send(link, lambda _: mapper(), linger_s=linger_s)
            except Exception as error:  # noqa: BLE001 - looked at by tests
                self.raised.append(error)

    def order(self, *, sizes=(NBYTES,)):
        order = ToSend(memory=Memory.HOST, device="CPU-0", manifest=len(WORD), chunks=sizes)
        with memfd.sealed_bytes("manifest", WORD) as sealed:
            self.link.send(codec.encode(order), [sealed, self.table, self._chunk])

    def stream(self):
        """A peer's end of a stream."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname(), timeout=10)
            far, _ = listener.accept()
        with OwnedFd(far.detach()) as fd:
            self.link.send(codec.encode(StreamOpened()), [fd])
        return near

    def ended(self, timeout=10):
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self):
        self.link.close()
        assert self.ended()
        self.table.close()
        self._chunk.close()


@pytest.fixture
def ranks():
    with ExitStack() as undo:

        def ranks(**more):
            chunk = filled(HostFiller())
            HostKeeper().seal(chunk.fileno(), NBYTES)
            return undo.enter_context(closing(Rank(chunk, **more)))

        yield ranks


@pytest.fixture
def rank(ranks):
    rank = ranks()
    rank.order()
    return rank


def asked(sock, place, nbytes):
    sock.sendall(place.encode())
    return received(sock, nbytes), received(sock, DIGEST_NBYTES)


def received(sock, nbytes):
    data = b""
    while len(data) < nbytes and (more := sock.recv(nbytes - len(data))):
        data += more
    return data


def digest(data):
    return blake3(data).digest()


def test_pieces_come_with_their_digests(rank):
    first, last = DATA[:PIECE], DATA[PIECE:]
    with rank.stream() as sock:
        assert asked(sock, PieceRequest(0, 1), len(last)) == (last, digest(last))
        assert asked(sock, PieceRequest(0, 0), PIECE) == (first, digest(first))
        assert asked(sock, PieceRequest(0, 0, PIECE - 5), 5) == (first[-5:], digest(first))
        assert asked(sock, PieceRequest(0, 1, len(last)), 0) == (b"", digest(last))
        assert asked(sock, PieceRequest(MANIFEST, 0), len(WORD)) == (WORD, digest(WORD))


def test_digests_are_made_once_and_stay_with_the_rank(ranks):
    rank = ranks()
    other = bytes(range(1, 33))
    os.pwrite(rank.table.fileno(), other, DIGEST_NBYTES)
    rank.order()
    with rank.stream() as sock:
        assert asked(sock, PieceRequest(0, 1), 8192) == (DATA[PIECE:], other)
        asked(sock, PieceRequest(0, 0), PIECE)
    assert os.pread(rank.table.fileno(), DIGEST_NBYTES, 0) == digest(DATA[:PIECE])


@pytest.mark.parametrize(
    "place",
    [
        PieceRequest(1, 0),
        PieceRequest(0, 2),
        PieceRequest(0, 1, 8193),
        PieceRequest(MANIFEST, 1),
        PieceRequest(MANIFEST - 1, 0),
    ],
)
def test_who_asks_for_what_is_not_there_is_hung_up_on(rank, place):
    with rank.stream() as sock, rank.stream() as other:
        sock.sendall(place.encode())
        assert sock.recv(1) == b""
        assert asked(other, PieceRequest(0, 1), 8192)[0] == DATA[PIECE:]


def test_who_says_nothing_is_hung_up_on(rank, monkeypatch):
    monkeypatch.setattr(of, "SILENT_S", 0.1)
    with rank.stream() as sock:
        sock.sendall(PieceRequest(0, 1).encode()[:5])
        assert sock.recv(1) == b""


@pytest.mark.slow
def test_who_takes_nothing_is_hung_up_on(rank, monkeypatch):
    monkeypatch.setattr(of, "SILENT_S", 0.1)
    with rank.stream() as sock:
        for _ in range(20):
            with suppress(OSError):
                sock.sendall(PieceRequest(0, 0).encode())
        time.sleep(0.5)
        with pytest.raises(ConnectionResetError):
            while sock.recv(1 << 20):
                pass
            raise ConnectionResetError


def test_who_takes_it_too_slowly_is_hung_up_on(rank, monkeypatch):
    monkeypatch.setattr(of, "SILENT_S", 0.05)
    monkeypatch.setattr(of, "PIECE_S", 0.3)
    with rank.stream() as sock:
        # More than the kernel takes of it by itself.
        for _ in range(4):
            sock.sendall(PieceRequest(0, 0).encode())
        begun = time.monotonic()
        while any(thread.name == "stream" for thread in threading.enumerate()):
            assert time.monotonic() - begun < 8
            sock.recv(4096)
            time.sleep(0.005)


def test_one_host_has_so_many_streams(rank, caplog):
    with ExitStack() as undo:
        socks = [undo.enter_context(rank.stream()) for _ in range(of.MOST_EACH + 1)]
        assert socks[-1].recv(1) == b""
        assert asked(socks[0], PieceRequest(0, 1), 8192)[0] == DATA[PIECE:]
    assert "127.0.0.1 has too many streams" in caplog.text


@pytest.mark.slow
def test_it_ends_when_nobody_wants_any_more(ranks):
    rank = ranks(linger_s=0.3)
    rank.order()
    with rank.stream() as sock:
        time.sleep(0.6)
        assert asked(sock, PieceRequest(0, 1), 8192)[0] == DATA[PIECE:]
    assert rank.ended()
    assert not rank.raised


def test_it_ends_with_its_rank(rank):
    with rank.stream() as sock:
        asked(sock, PieceRequest(0, 1), 8192)
        rank.link.close()
        assert sock.recv(1) == b""
    assert rank.ended()


def test_a_stream_before_the_order_is_a_violation(ranks):
    rank = ranks()
    rank.stream().close()
    assert rank.ended()
    assert isinstance(rank.raised[0], ProtocolViolation)


def test_a_stream_that_is_no_socket_is_a_violation(rank):
    with OwnedFd(os.open(os.devnull, os.O_RDONLY)) as other:
        rank.link.send(codec.encode(StreamOpened()), [other])
    assert rank.ended()
    (error,) = rank.raised
    assert isinstance(error, ProtocolViolation)
    assert "no socket" in str(error)


def test_chunks_of_another_size_are_not_sent(ranks):
    rank = ranks()
    rank.order(sizes=(NBYTES * 2,))
    assert rank.ended()
    assert isinstance(rank.raised[0], (DamagedManifest, ValueError))


def test_from_a_device_it_comes_through_pinned_memory(on_device, hip_library, caplog):
    from preloadd.memory.hip.driver import open_ordinal

    caplog.set_level(logging.INFO)
    with closing(open_ordinal(0, hip_library)) as driver:
        rank = Rank(filled(on_device), mapper=lambda: VmmMapper(driver))
        with closing(rank):
            rank.order()
            with rank.stream() as sock, rank.stream() as other:
                assert asked(sock, PieceRequest(0, 0), PIECE)[0] == DATA[:PIECE]
                assert asked(other, PieceRequest(0, 1, 9), 8183)[0] == DATA[PIECE + 9 :]
