import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from preloadd.errors import ProtocolViolation, Unavailable
from preloadd.protocol import codec
from preloadd.protocol.messages import Done, Refused, Reply, StatusTold
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


@pytest.mark.parametrize("reply", [Done(), Refused(code="internal", detail="busy")])
def test_any_other_answer_is_a_violation(socket_dir, reply):
    with daemon(socket_dir / "s", reply), pytest.raises(ProtocolViolation):
        ask_status(socket_dir / "s", timeout=5)
