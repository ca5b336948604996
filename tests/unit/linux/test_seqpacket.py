from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from preloadd.errors import ConfigError, ProtocolViolation
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.seqpacket import MAX_PATH, Pressure
from tests.listening import listen

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = seqpacket.pair()
    with left, right:
        yield left, right


def path_of(folder: Path, nbytes: int) -> Path:
    return folder / ("s" * (nbytes - len(os.fsencode(folder)) - 1))


def test_packets_keep_their_bounds_and_descriptors(pair: Pair) -> None:
    with OwnedFd(os.open("/dev/null", os.O_RDONLY)) as null:
        seqpacket.send(pair[0], b"one", [null.fileno()])
        seqpacket.send(pair[0], b"two")
        one, two = (seqpacket.receive(pair[1], 100) for _ in range(2))
        assert (one.data, len(one.fds), two.data, two.fds) == (b"one", 1, b"two", ())
        one.close()


def test_the_end_is_told_from_a_packet(pair: Pair) -> None:
    seqpacket.send(pair[0], b"last")
    pair[0].close()
    assert not seqpacket.receive(pair[1], 100).eof
    assert seqpacket.receive(pair[1], 100).eof


def test_an_empty_packet_is_not_sent(pair: Pair) -> None:
    with pytest.raises(ValueError, match="empty"):
        seqpacket.send(pair[0], b"")


def test_an_empty_packet_counts_as_the_end(pair: Pair) -> None:
    pair[0].send(b"")
    assert seqpacket.receive(pair[1], 100).eof


def test_an_empty_packet_with_descriptors_is_a_violation(pair: Pair) -> None:
    socket.send_fds(pair[0], [b""], [0])
    with pytest.raises(ProtocolViolation, match="no message"):
        seqpacket.receive(pair[1], 100)


def test_a_full_socket_says_to_wait_until_it_is_writable(pair: Pair) -> None:
    pair[0].setblocking(False)
    with pytest.raises(BlockingIOError) as caught:
        while True:
            seqpacket.send(pair[0], bytes(10_000))
    assert seqpacket.pressure(caught.value) is Pressure.WRITABLE


def test_a_peer_that_left_is_no_pressure(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(BrokenPipeError) as caught:
        seqpacket.send(pair[0], b"data")
    assert seqpacket.pressure(caught.value) is None


def fresh() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def test_who_has_hung_up_was_connected(pair: Pair) -> None:
    pair[1].close()
    with seqpacket.connected(OwnedFd(pair[0].detach())) as sock:
        assert seqpacket.receive(sock, 10).eof


@pytest.mark.parametrize("listens", [False, True])
def test_what_never_had_a_peer_is_not_connected(socket_dir: Path, listens: bool) -> None:
    with fresh() as sock:
        if listens:
            sock.bind(os.fspath(socket_dir / "s"))
            sock.listen()
        seqpacket.adopted(OwnedFd.copy_of(sock.fileno())).close()
        fd = OwnedFd.copy_of(sock.fileno())
        with pytest.raises(ProtocolViolation, match="a socket without a peer: Transport endpoint"):
            seqpacket.connected(fd)
    assert fd.closed


def test_what_is_no_socket_is_closed() -> None:
    fd = OwnedFd(os.open("/dev/null", os.O_RDONLY))
    with pytest.raises(ProtocolViolation, match="no socket: "):
        seqpacket.socket_of(fd)
    assert fd.closed


# Root and CAP_SYS_RESOURCE are exempt from the limit, so the child gives its capabilities up.
FLOODING = """
import ctypes, os, resource, sys
from preloadd.linux import seqpacket
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, nothing) == 0
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
left, right = seqpacket.pair()
left.setblocking(False)
try:
    while True:
        seqpacket.send(left, b"x", [0] * 50)
except OSError as error:
    print(seqpacket.pressure(error).name, error.errno)
"""


def test_too_many_descriptors_in_flight_say_to_wait_a_moment() -> None:
    done = subprocess.run([sys.executable, "-c", FLOODING], capture_output=True, text=True)
    assert done.stdout.split() == ["PAUSE", str(errno.ETOOMANYREFS)], done.stderr


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_listener_has_exactly_its_mode_and_leaves_nothing_else(
    socket_dir: Path, mode: int
) -> None:
    path = socket_dir / "rank.sock"
    mask = os.umask(0o077)
    try:
        with listen(path, mode, 5):
            found = path.lstat().st_mode
    finally:
        os.umask(mask)
    assert stat.S_ISSOCK(found)
    assert stat.S_IMODE(found) == mode
    assert list(socket_dir.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to any group")
def test_a_listener_may_be_given_to_a_group(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    with listen(path, 0o660, 5, group=12345):
        assert path.lstat().st_gid == 12345


def test_a_client_reaches_the_listener(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    with listen(path, 0o600, 5) as listener:
        with seqpacket.connect(path) as client:
            served, _ = listener.accept()
            with served:
                assert not any(map(os.get_inheritable, (s.fileno() for s in (client, served))))
                seqpacket.send(client, b"hello")
                assert seqpacket.receive(served, 100).data == b"hello"


def test_a_stale_socket_is_replaced(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    listen(path, 0o600, 5).close()
    with pytest.raises(ConnectionRefusedError):
        seqpacket.connect(path)
    with listen(path, 0o600, 5), seqpacket.connect(path):
        pass


def test_what_a_crash_left_half_way_does_not_matter(socket_dir: Path) -> None:
    (socket_dir / "~ank.sock").touch()
    with listen(socket_dir / "rank.sock", 0o600, 5):
        assert [path.name for path in socket_dir.iterdir()] == ["rank.sock"]


def test_a_failing_bind_leaves_nothing(socket_dir: Path) -> None:
    folder = socket_dir / "rank.sock"
    folder.mkdir()
    with pytest.raises(ConfigError, match=f"{folder}: Is a directory: remove it"):
        listen(folder, 0o600, 5)
    assert list(socket_dir.iterdir()) == [folder]
    with pytest.raises(ConfigError, match="choose a socket directory"):
        listen(socket_dir / "absent" / "rank.sock", 0o600, 5)


def test_a_folder_in_the_way_of_the_first_name_is_told(socket_dir: Path) -> None:
    (socket_dir / "~ank.sock").mkdir()
    with pytest.raises(ConfigError, match=r"~ank\.sock: Is a directory: remove it"):
        listen(socket_dir / "rank.sock", 0o600, 5)


def test_a_reserved_path_is_seen_when_it_listens_and_not_before(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    with seqpacket.Reservation(path, 0o640) as reserved:
        assert not path.exists()
        with reserved.listen(5), seqpacket.connect(path):
            assert stat.S_IMODE(path.lstat().st_mode) == 0o640
            assert list(socket_dir.iterdir()) == [path]
    assert path.is_socket()  # whoever listens decides when it goes


def test_a_reservation_that_is_given_up_leaves_nothing(socket_dir: Path) -> None:
    with seqpacket.Reservation(socket_dir / "rank.sock", 0o600):
        assert len(list(socket_dir.iterdir())) == 1
    assert not list(socket_dir.iterdir())


def test_what_stands_in_the_way_is_told_when_the_path_is_reserved(socket_dir: Path) -> None:
    (socket_dir / "rank.sock").mkdir()
    with pytest.raises(ConfigError, match="remove it"):
        seqpacket.Reservation(socket_dir / "rank.sock", 0o600)
    assert [path.name for path in socket_dir.iterdir()] == ["rank.sock"]


def test_a_socket_that_listens_where_nobody_sees_it(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    assert not seqpacket.listens_unseen(path)
    with seqpacket.Reservation(path, 0o600) as reserved:
        assert not seqpacket.listens_unseen(path), "it does not listen yet"
        with reserved.listen(8):
            assert not seqpacket.listens_unseen(path)
            path.unlink()
            assert seqpacket.listens_unseen(path)
            (socket_dir / "link").symlink_to(path.parent, target_is_directory=True)
            assert seqpacket.listens_unseen(socket_dir / "link" / path.name)
            (socket_dir / "link").unlink()
        assert not seqpacket.listens_unseen(path)


def test_a_socket_that_gets_its_name_meanwhile_is_seen(socket_dir: Path, monkeypatch) -> None:
    path = socket_dir / "rank.sock"
    with seqpacket.Reservation(path, 0o600) as reserved, ExitStack() as held:
        read = Path.read_bytes

        def listening(kernels: Path) -> bytes:
            held.enter_context(reserved.listen(8))
            return read(kernels)

        monkeypatch.setattr(Path, "read_bytes", listening)
        assert not seqpacket.listens_unseen(path)
        assert path.is_socket()


def test_all_that_a_killed_daemon_left_is_removed(socket_dir: Path) -> None:
    for name in ("rank.sock", "~ank.sock", "rank.lock"):
        (socket_dir / name).touch()
    for _ in range(2):
        seqpacket.remove(socket_dir / "rank.sock")
        assert [path.name for path in socket_dir.iterdir()] == ["rank.lock"]


def test_the_longest_path_works(socket_dir: Path) -> None:
    path = path_of(socket_dir, MAX_PATH)
    with listen(path, 0o600, 5), seqpacket.connect(path):
        pass
    with listen(socket_dir / "s", 0o600, 5), seqpacket.connect(socket_dir / "s"):
        pass


def test_a_longer_path_is_refused_with_its_length_and_the_remedy(socket_dir: Path) -> None:
    path = path_of(socket_dir, MAX_PATH + 1)
    for attempt in (lambda: listen(path, 0o600, 5), lambda: seqpacket.connect(path)):
        with pytest.raises(ConfigError) as caught:
            attempt()
        for part in (str(path), "108 bytes", "107", "shorter socket directory"):
            assert part in str(caught.value)


def test_the_length_counts_bytes_not_characters(socket_dir: Path) -> None:
    path = socket_dir / ("ü" * 50)
    with pytest.raises(ConfigError, match=f"{len(os.fsencode(path))} bytes"):
        seqpacket.connect(path)


def test_connecting_to_a_daemon_that_does_not_accept_ends_in_time(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    with ExitStack() as queue:
        queue.enter_context(listen(path, 0o600, 0))
        queue.enter_context(seqpacket.connect(path, timeout=1))
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=str(path)):
            seqpacket.connect(path, timeout=0.05)
        assert 0.04 < time.monotonic() - start < 1


def test_the_timeout_is_for_connecting_only(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    with listen(path, 0o600, 5), seqpacket.connect(path, timeout=1) as client:
        assert client.gettimeout() is None
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16) == bytes(16)


def test_a_socket_that_was_passed_is_taken(pair: Pair) -> None:
    passed = OwnedFd.copy_of(pair[0].fileno())
    with seqpacket.adopted(passed) as sock:
        assert passed.closed
        sock.send(b"here")
        assert pair[1].recv(10) == b"here"


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, None])
def test_what_is_no_such_socket_is_refused_and_closed(kind: socket.SocketKind | None) -> None:
    if kind is None:
        passed = OwnedFd(os.open("/dev/null", os.O_RDONLY))
    else:
        passed = OwnedFd(socket.socket(socket.AF_UNIX, kind).detach())
    with pytest.raises(ProtocolViolation, match=r"no socket|of another kind"):
        seqpacket.adopted(passed)
    assert passed.closed


def test_who_may_connect_can_be_changed(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    with listen(path, 0o600, 5):
        seqpacket.set_access(path, 0o660, group=os.getegid())
        found = path.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, os.getegid())
        seqpacket.set_access(path, 0o600)
        assert path.stat().st_gid == os.getegid()
