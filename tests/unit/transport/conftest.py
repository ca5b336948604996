"""Both ends of real sockets, and a process that is nobody in particular or near its limits."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from preloadd.domain.settings import Tls
from preloadd.linux import memfd, seqpacket
from preloadd.linux.fds import OwnedFd
from tests.certificates import authority, certificate, key_of

NOBODY = 65534


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = seqpacket.pair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def fds() -> Iterator[list[OwnedFd]]:
    """Three memory files: what a grant of two chunks has."""
    files = [memfd.sealed_bytes(f"test-{n}", bytes([n])) for n in range(3)]
    yield files
    for file in files:
        file.close()


@pytest.fixture
def unprivileged() -> Callable[[], AbstractContextManager[None]]:
    """A context in which this process is not root, who passes checks that hold for others."""
    return _unprivileged


@contextmanager
def _unprivileged() -> Iterator[None]:
    before = os.geteuid()
    os.seteuid(before or NOBODY)
    yield
    os.seteuid(before)


@pytest.fixture
def in_flight(
    unprivileged: Callable[[], AbstractContextManager[None]],
    descriptors_left: Callable[[int], AbstractContextManager[None]],
) -> Iterator[Callable[[], None]]:
    """As many descriptors on their way as this user may have; called, they land."""
    ours, theirs = seqpacket.pair()
    with ours, theirs, descriptors_left(20), unprivileged():
        with pytest.raises(OSError, match="Too many references"):
            while True:
                seqpacket.send(ours, b"x", [2] * 16)
        yield theirs.close


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files by what they are."""
    folder = tmp_path_factory.mktemp("certificates")
    ca, other = authority(folder, "ca"), authority(folder, "other")
    return {
        "ca": ca,
        "other": other,
        "source": certificate(ca, "source"),
        "target": certificate(ca, "target", "DNS:target"),
        "elsewhere": certificate(ca, "elsewhere", "IP:127.0.0.2"),
        "stranger": certificate(other, "stranger"),
    }


@pytest.fixture
def tls(made):
    """The settings that present one of those certificates, and trust one of the authorities."""

    def tls(cert="", ca="ca"):
        files = (str(made[cert]), str(key_of(made[cert]))) if cert else ("", "")
        return Tls(*files, ca=str(made[ca]) if ca else "")

    return tls
