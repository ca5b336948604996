import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from preloadd.errors import AccessDenied, ProtocolViolation, Unavailable
from preloadd.protocol import codec
from preloadd.protocol.messages import Done, NotAvailable, Reason, Refused, Reply, StatusTold
from preloadd.transport.status import ask_status

TOLD = StatusTold(
    group="g",
    instance="CPU-0",
    device="CPU-0",
    role="target",
    pid=os.getpid(),
    version="0",
    state=State.SERVING,
)


@contextmanager
def daemon(path: Path, reply: Reply | None) -> Iterator[None]:
    """A daemon that answers one request with `reply`, or keeps silent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1 << 16)
                if reply is not None:
                    client.send(codec.encode(reply))
                client.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_tells_what_the_daemon_told(socket_dir):
    with daemon(socket_dir / "s", TOLD):
        assert ask_status(socket_dir / "s", timeout=5) == TOLD


def test_silence_ends_with_the_timeout(socket_dir):
    with daemon(socket_dir / "s", None), pytest.raises(Unavailable, match=r"0\.05 s"):
        ask_status(socket_dir / "s", timeout=0.05)


def test_nobody_there(socket_dir):
    with pytest.raises(Unavailable, match="no socket"):
        ask_status(socket_dir / "s", timeout=1)


def test_what_answers_no_question_for_a_status_is_a_violation(socket_dir):
    with daemon(socket_dir / "s", Done()), pytest.raises(ProtocolViolation, match="done"):
        ask_status(socket_dir / "s", timeout=5)


@pytest.mark.parametrize(
    "reply",
    [
        Refused(code="internal", detail="see log"),
        NotAvailable(reason=Reason.BUSY, detail="256 clients"),
    ],
)
def test_a_rank_that_does_not_tell_is_named(socket_dir, reply):
    with daemon(socket_dir / "s", reply), pytest.raises(ProtocolViolation, match=str(socket_dir)):
        ask_status(socket_dir / "s", timeout=5)


def test_who_may_not_ask_is_told_so(socket_dir):
    reply = Refused(code="denied", detail="user 5 may not")
    with daemon(socket_dir / "s", reply), pytest.raises(AccessDenied, match="user 5 may not"):
        ask_status(socket_dir / "s", timeout=5)
