from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import preloadd
from preloadd.errors import ConfigError, ProtocolViolation
from preloadd.linux import memfd
from preloadd.linux.fds import MAX_FDS
from preloadd.linux.notify import (
    MAX_DATAGRAM,
    PROGRESS,
    Notification,
    Notifier,
    NotifySocket,
    valid_name,
)


@pytest.fixture
def manager(socket_dir: Path) -> Iterator[NotifySocket]:
    with NotifySocket(socket_dir / "notify") as manager:
        yield manager


@pytest.fixture
def notifier(manager: NotifySocket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notifier]:
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    with closing(Notifier(os.environ)) as notifier:
        yield notifier


@pytest.mark.parametrize(("flags", "found"), [([], "site-packages"), (["-S"], "bundled")])
def test_sdnotify_is_that_of_the_environment_before_the_bundled_one(
    manager: NotifySocket, tmp_path: Path, flags: list[str], found: str
) -> None:
    """As in a package of the system: code in a folder, and there what environments may lack."""
    (tmp_path / "preloadd").symlink_to(Path(preloadd.__file__).parent)
    shutil.copytree(Path(sysconfig.get_path("purelib"), "sdnotify"), tmp_path / "bundled/sdnotify")
    script = (
        "import os; from preloadd.linux.notify import Notifier; Notifier(os.environ).ready()\n"
        "import sdnotify; print(sdnotify.__file__)"
    )
    environ = {"NOTIFY_SOCKET": str(manager.path), "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-P", *flags, "-c", script],
        env={**environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert Path(run.stdout.strip()).parts[-3] == found, run.stderr
    assert told(manager).fields == {"READY": "1"}


def told(manager: NotifySocket) -> Notification:
    notification = manager.receive()
    assert notification is not None
    return notification


def send_raw(manager: NotifySocket, data: bytes, fds: list[int] | None = None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(str(manager.path))
        socket.send_fds(sock, [data], fds or [])


@pytest.mark.parametrize(
    ("tell", "fields"),
    [
        (Notifier.ready, {"READY": "1"}),
        (Notifier.watchdog, {"WATCHDOG": "1"}),
        (Notifier.stopping, {"STOPPING": "1"}),
        (lambda n: n.status("50 % of läma"), {"STATUS": "50 % of läma"}),
        (lambda n: n.extend_timeout(1.5), {"EXTEND_TIMEOUT_USEC": "1500000"}),
        (lambda n: n.remove("chunk 1"), {"FDSTOREREMOVE": "1", "FDNAME": "chunk 1"}),
        (
            lambda n: n.progress("half", "read", 5, 10),
            {"STATUS": "half", PROGRESS: "read;5;10"},
        ),
    ],
)
def test_messages_arrive_with_their_sender(
    manager: NotifySocket,
    notifier: Notifier,
    tell: Callable[[Notifier], None],
    fields: dict[str, str],
) -> None:
    tell(notifier)
    assert select.select([manager], [], [], 0)[0]
    assert told(manager) == Notification(fields, (), os.getpid())
    assert manager.receive() is None


def test_a_status_cannot_forge_fields_and_always_fits(
    manager: NotifySocket, notifier: Notifier
) -> None:
    notifier.status("loading\nREADY=1\r\nFDSTORE=1")
    assert told(manager).fields == {"STATUS": "loading READY=1 FDSTORE=1"}
    notifier.status("\N{GRINNING FACE}" * 5000)
    assert told(manager).fields["STATUS"].startswith("\N{GRINNING FACE}" * 500)
    notifier.status("a file named \udcff")
    assert told(manager).fields == {"STATUS": "a file named ?"}


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier({})
    assert not notifier.listening
    notifier.ready()
    notifier.status("text")
    notifier.store("name", [0], poll=True)
    notifier.barrier(0.0)
    notifier.close()


def test_a_manager_that_is_named_but_absent_is_told(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(socket_dir / "absent"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # sdnotify drops its socket unclosed
        with pytest.raises(ConfigError, match="NOTIFY_SOCKET") as caught:
            Notifier(os.environ)
    assert str(socket_dir / "absent") in str(caught.value)


def test_information_that_cannot_be_sent_is_complained_about_once(
    manager: NotifySocket, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    manager.close()
    with caplog.at_level(logging.WARNING):
        notifier.status("one")
        notifier.watchdog()
    assert [record.getMessage() for record in caplog.records] == [
        "the service manager cannot be told ['STATUS']: [Errno 111] Connection refused"
    ]


@pytest.mark.timeout(10)
def test_information_never_waits_for_a_manager_that_does_not_listen(
    manager: NotifySocket, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for number in range(2000):
            notifier.status(f"{number} of 2000")
    # It may just be busy, and knows more in a moment: nothing that people need to hear of.
    assert "temporarily unavailable" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert told(manager).fields == {"STATUS": "0 of 2000"}


def test_the_last_word_waits_for_room(manager: NotifySocket, notifier: Notifier) -> None:
    for number in range(2000):
        notifier.status(f"{number} of 2000")
    said: list[str] = []

    def read() -> None:
        while not said or not said[-1].startswith("failed"):
            select.select([manager], [], [])
            said.append(told(manager).fields["STATUS"])

    thread = threading.Thread(target=read)
    thread.start()
    assert notifier.failed(ValueError("no\ndisk"))
    thread.join()
    assert said[-1] == "failed: no disk"


def test_the_last_word_to_nobody_is_no_error(manager: NotifySocket, notifier: Notifier) -> None:
    manager.close()
    assert not notifier.failed("no disk")


def test_the_last_word_is_told_to_be_cut(manager: NotifySocket, notifier: Notifier) -> None:
    assert not notifier.failed("x" * 2000)
    assert told(manager).fields["STATUS"].startswith("failed: xxx")


@pytest.mark.parametrize(
    "tell",
    [
        Notifier.ready,
        lambda n: n.store("name", [0], poll=False),
        lambda n: n.remove("name"),
        lambda n: n.barrier(1),
    ],
)
def test_what_matters_fails_without_the_manager(
    manager: NotifySocket, notifier: Notifier, tell: Callable[[Notifier], None]
) -> None:
    manager.close()
    with pytest.raises(ConnectionRefusedError):
        tell(notifier)


@pytest.mark.parametrize(
    ("poll", "fields"),
    [
        (True, {"FDSTORE": "1", "FDNAME": "lease.1"}),
        (False, {"FDSTORE": "1", "FDNAME": "lease.1", "FDPOLL": "0"}),
    ],
)
def test_stored_descriptors_arrive_owned_and_named(
    manager: NotifySocket, notifier: Notifier, poll: bool, fields: dict[str, str]
) -> None:
    with memfd.sealed_bytes("payload", b"data") as fd:
        notifier.store("lease.1", [fd.fileno()], poll=poll)
        with closing(told(manager)) as stored:
            assert stored.fields == fields
            assert stored.name == "lease.1"
            assert not os.get_inheritable(stored.fds[0].fileno())
            assert memfd.read_sealed(stored.fds[0].fileno(), 10) == b"data"


def test_many_descriptors_are_split_as_the_kernel_wants(
    manager: NotifySocket, notifier: Notifier
) -> None:
    with memfd.create("chunk") as fd, ExitStack() as received:
        notifier.store("chunks", [fd.fileno()] * (MAX_FDS + 47), poll=False)
        packets = [received.enter_context(closing(told(manager))) for _ in range(2)]
    assert [len(packet.fds) for packet in packets] == [MAX_FDS, 47]
    assert {packet.name for packet in packets} == {"chunks"}


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "grün", "x" * 256])
def test_names_systemd_would_replace_are_refused(notifier: Notifier, name: str) -> None:
    assert not valid_name(name)
    with pytest.raises(ValueError, match="printable ASCII"):
        notifier.store(name, [0], poll=False)
    with pytest.raises(ValueError, match="printable ASCII"):
        notifier.remove(name)


def test_a_barrier_waits_for_its_answer(manager: NotifySocket, notifier: Notifier) -> None:
    notifier.status("before")
    answered = threading.Event()

    def serve() -> None:
        select.select([manager], [], [])
        told(manager)
        select.select([manager], [], [])
        with closing(told(manager)) as barrier:
            assert barrier.fields == {"BARRIER": "1"}
            answered.set()

    thread = threading.Thread(target=serve)
    thread.start()
    notifier.barrier(10)
    assert answered.is_set()
    thread.join()


def test_a_barrier_nobody_answers_ends_in_time(manager: NotifySocket, notifier: Notifier) -> None:
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        notifier.barrier(0.01)
    told(manager).close()


def test_the_sender_is_the_process_that_sent(manager: NotifySocket) -> None:
    source = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
    source += "s.sendto(b'READY=1', sys.argv[1])"
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", source, manager.path])
    assert child.wait() == 0
    assert told(manager).pid == child.pid


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"STATUS=" + b"x" * MAX_DATAGRAM, "more than 4096 bytes"),
        (b"STATUS=\xff", "no text"),
        (b"FDSTORE=1\nFDNAME=a:b", "'a:b'"),
        (b"FDSTORE=1\nFDNAME=", "''"),
    ],
)
def test_bad_messages_are_refused_and_their_descriptors_closed(
    manager: NotifySocket, data: bytes, complaint: str
) -> None:
    send_raw(manager, data, [0, 0])
    with pytest.raises(ProtocolViolation, match=complaint):
        manager.receive()
    send_raw(manager, b"READY=1")
    assert told(manager).fields == {"READY": "1"}


def test_odd_lines_are_passed_over_and_the_first_of_equal_keys_counts(
    manager: NotifySocket,
) -> None:
    send_raw(manager, b"\nnonsense\nA=1=2\nA=3\n\x0b=4\n")
    notification = told(manager)
    assert notification.fields == {"A": "1=2", "\x0b": "4"}
    assert notification.name == "stored"


@given(data=st.binary(max_size=MAX_DATAGRAM + 1))
def test_any_message_is_understood_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    with NotifySocket(tmp_path_factory.getbasetemp() / "any") as manager:
        send_raw(manager, data, [0])
        with suppress(ProtocolViolation):
            told(manager).close()
        assert manager.receive() is None


def test_a_stale_path_is_replaced_and_the_own_one_removed(socket_dir: Path) -> None:
    path = socket_dir / "notify"
    path.touch()
    with NotifySocket(path) as manager:
        send_raw(manager, b"READY=1")
        told(manager)
    assert not path.exists()


def test_a_path_that_cannot_be_bound_is_told(socket_dir: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory") as caught:
        NotifySocket(socket_dir / "gone" / "notify")
    assert str(socket_dir / "gone" / "notify") in str(caught.value)


def test_a_path_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="107"):
        NotifySocket(tmp_path / ("n" * 100))
