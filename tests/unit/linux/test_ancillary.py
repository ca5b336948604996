from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from preloadd.errors import OutOfDescriptors, ProtocolViolation
from preloadd.linux import ancillary, seqpacket
from preloadd.linux.fds import MAX_FDS, OwnedFd
from tests.descriptors import open_descriptors

Pair = tuple[socket.socket, socket.socket]
SO_PASSPIDFD = 76


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = seqpacket.pair()
    with left, right:
        yield left, right


@pytest.fixture
def null() -> Iterator[OwnedFd]:
    with OwnedFd(os.open("/dev/null", os.O_RDONLY)) as fd:
        yield fd


@contextmanager
def descriptor_limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("count", [0, 1, 2, 3, MAX_FDS - 1, MAX_FDS])
def test_as_many_descriptors_arrive_as_were_sent(pair: Pair, null: OwnedFd, count: int) -> None:
    ancillary.send(pair[0], b"data", [null.fileno()] * count)
    received = ancillary.receive(pair[1], 100)
    with ExitStack() as owned:
        fds = [owned.enter_context(fd) for fd in received.fds]
        assert received.data == b"data"
        assert len({fd.fileno() for fd in fds}) == count
        assert not any(os.get_inheritable(fd.fileno()) for fd in fds)
        assert all(os.path.sameopenfile(fd.fileno(), null.fileno()) for fd in fds)


def test_more_than_the_kernel_carries_are_refused_before_sending(pair: Pair, null: OwnedFd) -> None:
    with pytest.raises(ValueError, match="254 descriptors"):
        ancillary.send(pair[0], b"data", [null.fileno()] * (MAX_FDS + 1))


def test_a_packet_over_the_limit_is_a_violation_and_its_descriptors_are_closed(
    pair: Pair, null: OwnedFd
) -> None:
    ancillary.send(pair[0], b"12345", [null.fileno()] * 3)
    before = open_descriptors()
    with pytest.raises(ProtocolViolation, match="more than 4 bytes"):
        ancillary.receive(pair[1], 4)
    assert open_descriptors() == before


@pytest.mark.parametrize("room", [0, 3])
def test_descriptors_lost_at_the_limit_name_it_and_those_that_came_are_closed(
    pair: Pair, null: OwnedFd, room: int
) -> None:
    ancillary.send(pair[0], b"data", [null.fileno()] * 5)
    before = open_descriptors()
    with null.duplicate() as lowest:
        first_free = lowest.fileno()
    with descriptor_limit(first_free + room), pytest.raises(OutOfDescriptors) as caught:
        ancillary.receive(pair[1], 100)
    assert "ulimit -n" in str(caught.value)
    assert f"{room} arrived" in str(caught.value)
    assert open_descriptors() == before


def test_descriptors_lost_otherwise_are_a_violation(pair: Pair, null: OwnedFd) -> None:
    # Two more control messages than there is room for besides the most descriptors.
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        pair[1].setsockopt(socket.SOL_SOCKET, SO_PASSPIDFD, 1)
    except OSError:
        pytest.skip("SO_PASSPIDFD needs Linux 6.5")
    ancillary.send(pair[0], b"data", [null.fileno()] * MAX_FDS)
    before = open_descriptors()
    with pytest.raises(ProtocolViolation, match="cut the descriptors"):
        ancillary.receive(pair[1], 100)
    assert open_descriptors() == before


def test_the_sender_is_known_where_the_receiver_asked_for_it(pair: Pair) -> None:
    ancillary.send(pair[0], b"data", [])
    assert ancillary.receive(pair[1], 100).pid == 0
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ancillary.send(pair[0], b"data", [])
    assert ancillary.receive(pair[1], 100).pid == os.getpid()
