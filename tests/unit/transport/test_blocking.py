import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from preloadd.domain.lifecycle import State
from preloadd.errors import (
    AccessDenied,
    ConfigError,
    ErrorCode,
    InsecurePath,
    OutOfDescriptors,
    ProtocolViolation,
    Unavailable,
)
from preloadd.linux import peers, seqpacket
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Client, Link, connect
from tests.listening import listen

CHANGED = m.StateChanged(state=State.SERVING)
HELD = m.MemoryHeld(nbytes=7)
MEMORY = m.Memory(key={}, device="CPU-0")
ATTACH = m.Attach(key={}, device="CPU-0")
GRANTED = m.Granted(generation="0a" * 16, lease="0b" * 8, backend="host", manifest=1, chunks=(1, 1))
BUSY = m.NotAvailable(reason=m.Reason.BUSY, detail="256 clients")


@pytest.fixture
def daemon(pair) -> socket.socket:
    """The daemon's end. What it sends before it is asked waits in the socket."""
    return pair[1]


@pytest.fixture
def client(pair) -> Iterator[Client]:
    with Client(pair[0], "/run/preloadd/CPU-0/rank.sock") as client:
        yield client


def tell(daemon: socket.socket, reply: m.Reply, fds=()) -> None:
    seqpacket.send(daemon, codec.encode(reply), [fd.fileno() for fd in fds])


def asked(daemon: socket.socket) -> m.Request:
    return codec.decode_request(seqpacket.receive(daemon, m.MAX_PACKET).data)


def assert_closed(client: Client) -> None:
    assert client.fileno() == -1
    with pytest.raises(ProtocolViolation, match="closed"):
        client.call(MEMORY, timeout=1)


@contextmanager
def interrupted(every: float) -> Iterator[None]:
    """A signal handler runs again and again, and returns."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, every, every)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class TestCall:
    def test_brings_the_answer(self, client, daemon):
        tell(daemon, HELD)
        assert client.call(MEMORY, timeout=1) == (HELD, ())
        assert asked(daemon) == MEMORY

    def test_brings_the_descriptors_of_a_grant(self, client, daemon, fds):
        tell(daemon, GRANTED, fds)
        reply, received = client.call(ATTACH, timeout=1)
        assert reply == GRANTED
        assert [os.pread(fd.fileno(), 9, 0) for fd in received] == [b"\0", b"\1", b"\2"]
        assert not any(os.get_inheritable(fd.fileno()) for fd in received)
        for fd in received:
            fd.close()

    def test_may_be_repeated(self, client, daemon):
        for reply in (HELD, BUSY, m.Refused(code="denied", detail=""), HELD):
            tell(daemon, reply)
            assert client.call(MEMORY, timeout=1).reply == reply

    @pytest.mark.parametrize(
        ("reply", "count", "text"),
        [
            (GRANTED, 2, "2 descriptors for a manifest and 2 chunks"),
            (GRANTED, 0, "0 descriptors"),
            (HELD, 0, "answered attach with memory-held"),
            (BUSY, 1, "descriptors where none belong: 1"),
        ],
    )
    def test_closes_what_a_lying_daemon_sent(self, client, daemon, fds, reply, count, text):
        tell(daemon, reply, fds[:count])
        with pytest.raises(ProtocolViolation, match=text):
            client.call(ATTACH, timeout=1)
        assert_closed(client)

    @pytest.mark.parametrize(
        ("packet", "text"),
        [
            (b"\1garbage", "not a reply"),
            (b"\2" + codec.encode(HELD)[1:], "version 2"),
            (codec.encode(MEMORY), "Invalid value 'memory'"),
            (b"\1" * (m.MAX_PACKET + 1), "more than 65536 bytes"),
        ],
    )
    def test_closes_what_comes_with_garbage(self, client, daemon, fds, packet, text):
        seqpacket.send(daemon, packet, [fd.fileno() for fd in fds])
        with pytest.raises(ProtocolViolation, match=text):
            client.call(ATTACH, timeout=1)
        assert_closed(client)

    def test_fails_without_room_for_the_descriptors(self, client, daemon, fds, descriptors_left):
        tell(daemon, GRANTED, fds)
        with descriptors_left(2), pytest.raises(OutOfDescriptors, match="ulimit -n"):
            client.call(ATTACH, timeout=1)
        assert_closed(client)

    def test_does_not_wait_longer_than_told(self, client):
        started = time.monotonic()
        with pytest.raises(Unavailable, match=r"rank.sock did not answer attach within 0.05 s"):
            client.call(ATTACH, timeout=0.05)
        assert 0.05 <= time.monotonic() - started < 1
        assert_closed(client)

    def test_does_not_wait_longer_for_room_to_send(self, pair, client):
        ours, _ = pair
        with pytest.raises(BlockingIOError):
            while True:
                ours.send(b"x" * 500, socket.MSG_DONTWAIT)
        with pytest.raises(Unavailable, match="did not answer"):
            client.call(ATTACH, timeout=0.05)

    def test_signals_neither_end_nor_prolong_the_wait(self, client):
        started = time.monotonic()
        with interrupted(0.005), pytest.raises(Unavailable, match="did not answer"):
            client.call(ATTACH, timeout=0.05)
        assert 0.05 <= time.monotonic() - started < 1

    def test_an_exception_in_a_signal_handler_ends_it(self, client):
        def handler(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            client.call(ATTACH, timeout=5)
        signal.signal(signal.SIGALRM, before)
        assert_closed(client)

    def test_a_daemon_that_hangs_up_is_absent(self, client, daemon):
        daemon.close()
        with pytest.raises(Unavailable, match=r"rank.sock hung up: .*see its log") as caught:
            client.call(ATTACH, timeout=1)
        assert caught.value.reason == "absent"
        assert_closed(client)

    def test_what_a_daemon_said_before_it_hung_up_counts(self, client, daemon):
        tell(daemon, BUSY)
        daemon.close()
        assert client.call(ATTACH, timeout=1).reply == BUSY

    def test_so_it_does_if_the_request_was_not_read(self, client, daemon):
        """The kernel then reports the unread request before it hands out the answer."""

        def hang_up():
            while not daemon.recv(1, socket.MSG_PEEK):
                pass
            tell(daemon, BUSY)
            daemon.close()

        other = threading.Thread(target=hang_up)
        other.start()
        assert client.call(ATTACH, timeout=2).reply == BUSY
        other.join()

    def test_a_request_that_does_not_fit_is_an_error(self, client):
        with pytest.raises(ProtocolViolation, match="key field 'quantization'"):
            client.call(m.Attach(key={"quantization": "q" * 70_000}, device=""), timeout=1)


class TestEvent:
    @pytest.fixture
    def watching(self, client, daemon) -> Client:
        tell(daemon, CHANGED)
        assert client.call(m.Watch(), timeout=1).reply == CHANGED
        return client

    def test_comes_when_the_daemon_tells(self, watching, daemon):
        stopped = m.StateChanged(state=State.STOPPING)
        tell(daemon, stopped)
        assert watching.event(timeout=1) == stopped

    def test_may_fail_to_come_in_time(self, watching, daemon):
        assert watching.event(timeout=0.01) is None
        tell(daemon, CHANGED)
        assert watching.event() == CHANGED

    def test_never_comes_from_a_daemon_that_is_gone(self, watching, daemon):
        daemon.close()
        with pytest.raises(Unavailable, match="hung up"):
            watching.event()
        assert watching.fileno() == -1

    def test_never_comes_from_a_daemon_that_gives_up(self, watching, daemon):
        tell(daemon, m.Refused(code=ErrorCode.INTERNAL, detail="the daemon failed"))
        with pytest.raises(Unavailable, match="tells no more: the daemon failed"):
            watching.event()
        assert watching.fileno() == -1


class TestLink:
    def test_waits_for_descriptors_in_flight_to_land(self, pair, fds, in_flight):
        ours, theirs = pair
        link = Link(ours)
        with pytest.raises(TimeoutError):
            link.send(b"packet", fds, deadline=time.monotonic() + 0.03)
        landing = threading.Timer(0.03, in_flight)
        landing.start()
        link.send(b"packet", fds, deadline=time.monotonic() + 5)
        landing.join()
        with closing(seqpacket.receive(theirs, 999)) as packet:
            assert (packet.data, len(packet.fds)) == (b"packet", 3)

    def test_waits_for_the_peer_to_read(self, pair):
        ours, theirs = pair
        packets = 2000
        received = []

        def read():
            while packet := theirs.recv(999):
                received.append(packet)

        reader = threading.Thread(target=read)
        reader.start()
        link = Link(ours)
        for _ in range(packets):
            link.send(b"x" * 500)
        link.close()
        reader.join()
        assert len(received) == packets

    def test_a_peer_that_is_gone_is_an_error_to_send_to_and_an_end_to_read(self, pair):
        ours, theirs = pair
        theirs.close()
        with pytest.raises(BrokenPipeError):
            Link(ours).send(b"packet")
        assert Link(ours).receive().eof

    def test_a_past_deadline_is_over(self, pair):
        with pytest.raises(TimeoutError):
            Link(pair[0]).receive(deadline=time.monotonic())


class TestConnect:
    @pytest.fixture
    def path(self, socket_dir):
        return socket_dir / "rank.sock"

    def test_reaches_who_listens(self, path):
        with listen(path, 0o600, 1) as listener, connect(path, timeout=1) as client:
            daemon, _ = listener.accept()
            with daemon:
                tell(daemon, HELD)
                assert client.call(MEMORY, timeout=1).reply == HELD

    def test_finds_no_socket(self, path):
        for absent in (path, path / "below"):
            with pytest.raises(Unavailable, match=f"there is no socket {absent}; start one"):
                connect(absent, timeout=1)
            path.touch(exist_ok=True)

    @pytest.mark.parametrize("make", ["stale", "file"])
    def test_finds_nobody_listening(self, path, make):
        listen(path, 0o600, 1).close() if make == "stale" else path.touch()
        with pytest.raises(Unavailable, match=f"nobody listens on {path}: .*start it") as caught:
            connect(path, timeout=1)
        assert caught.value.reason == "absent"

    def test_finds_another_kind_of_socket(self, path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.bind(str(path))
            other.listen()
            with pytest.raises(Unavailable, match=f"{path} is no socket of a preloadd daemon"):
                connect(path, timeout=1)

    def test_may_be_forbidden(self, path, unprivileged):
        with listen(path, 0, 1), unprivileged():
            with pytest.raises(AccessDenied, match=rf"{path}: list .*access.groups"):
                connect(path, timeout=1)

    def test_does_not_wait_longer_than_told(self, path):
        with listen(path, 0o600, 0):
            with connect(path, timeout=1):
                with pytest.raises(Unavailable, match=f"{path} took no connection within 0.05 s"):
                    connect(path, timeout=0.05)

    def test_needs_a_descriptor(self, path, descriptors_left):
        with descriptors_left(0), pytest.raises(OutOfDescriptors, match=f"connecting to {path}"):
            connect(path, timeout=1)

    def test_takes_no_path_that_is_too_long(self, path):
        with pytest.raises(ConfigError, match="107"):
            connect(path / ("x" * 107), timeout=1)

    def test_lets_go_of_who_does_not_pass_the_check(self, path):
        def check(sock):
            assert peers.peer(sock).pid == os.getpid()
            raise InsecurePath("the daemon runs as user 1000")

        with listen(path, 0o600, 1), pytest.raises(InsecurePath, match="user 1000"):
            connect(path, timeout=1, check=check)


def test_a_watch_is_asked_without_waiting_and_its_answer_is_the_first_event(client, daemon):
    client.watch(timeout=1)
    assert asked(daemon) == m.Watch()
    assert client.event(timeout=0.01) is None
    for _ in range(2):
        tell(daemon, CHANGED)
        assert client.event(timeout=1) == CHANGED


def test_who_may_not_watch_learns_why(client, daemon):
    tell(daemon, BUSY)
    daemon.close()
    client.watch(timeout=1)
    with pytest.raises(Unavailable, match="tells no more: 256 clients") as turned_away:
        client.event(timeout=1)
    assert turned_away.value.reason == m.Reason.BUSY
    assert_closed(client)


def test_a_daemon_that_does_not_read_is_not_watched(client, daemon):
    with pytest.raises(Unavailable, match="does not read"):
        client.watch(timeout=0)
    assert_closed(client)
