"""Waits of sockets, on real ones."""

import socket
import threading
import time

import pytest

from preloadd.linux.waits import limit


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_call_waits_until_all_is_there(pair):
    ours, theirs = pair
    limit(ours, 5.0)
    sending = threading.Thread(
        target=lambda: [theirs.send(b"ab"), time.sleep(0.05), theirs.send(b"c")]
    )
    sending.start()
    assert ours.recv(3, socket.MSG_WAITALL) == b"abc"
    sending.join()


def test_what_came_by_then_is_returned(pair):
    ours, theirs = pair
    limit(ours, 0.05)
    theirs.send(b"ab")
    assert ours.recv(3, socket.MSG_WAITALL) == b"ab"


def test_nothing_by_then_is_an_error(pair):
    ours, _ = pair
    limit(ours, 0.05)
    begun = time.monotonic()
    with pytest.raises(BlockingIOError):
        ours.recv(3, socket.MSG_WAITALL)
    assert 0.04 < time.monotonic() - begun < 1


def test_sending_ends_as_well(pair):
    ours, _ = pair
    limit(ours, 0.05)
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(bytes(1 << 20))


def test_it_holds_for_one_that_was_not_to_block(pair):
    ours, _ = pair
    ours.settimeout(0)
    limit(ours, 0.05)
    begun = time.monotonic()
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    assert time.monotonic() - begun > 0.04
