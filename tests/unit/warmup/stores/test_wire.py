import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.warmup.stores import wire
from preloadd.warmup.stores.wire import Outcome, Reply, Request, Verb


def soon(seconds=5.0):
    return time.monotonic() + seconds


@given(
    st.sampled_from(Verb),
    st.floats(0, 1e6),
    st.text(st.characters(codec="utf-8"), max_size=50),
    st.integers(0, 1 << 40),
    st.binary(max_size=200),
)
def test_requests_arrive_as_they_were_sent(verb, seconds, key, limit, value):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        request = Request(verb, seconds, key, limit, value)
        wire.send_request(ours, request, soon())
        assert wire.receive_request(theirs, soon()) == request


@given(st.sampled_from(Outcome), st.binary(max_size=200))
def test_replies_arrive_as_they_were_sent(outcome, body):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send_reply(ours, Reply(outcome, body))
        assert wire.receive_reply(theirs, len(body), soon()) == Reply(outcome, body)


@given(st.binary(max_size=40))
def test_whatever_comes_in_the_place_of_a_reply_is_told_apart(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.close()
        try:
            wire.receive_reply(theirs, 100, soon())
        except (EOFError, OSError):
            pass
        else:
            assert len(data) >= 9


@pytest.mark.parametrize("reply", [Reply(Outcome.FOUND, b"12345"), b"\x09" + bytes(8)])
def test_what_is_too_long_or_no_reply(reply):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(reply) if isinstance(reply, bytes) else wire.send_reply(ours, reply)
        with pytest.raises(OSError, match="a reply"):
            wire.receive_reply(theirs, 4, soon())


def test_nobody_is_waited_for_any_longer():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            wire.receive_reply(ours, 9, soon(0.05))
        with pytest.raises(TimeoutError):
            wire.send_request(ours, Request(Verb.KEEP, 1, "k", value=bytes(1 << 24)), soon(0.05))
        assert time.monotonic() - begun < 1


def test_trickled_bytes_do_not_make_it_longer():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stop = threading.Event()
        theirs.send(b"\1" + (1 << 16).to_bytes(8, "big"))

        def trickle():
            while not stop.wait(0.01):
                theirs.send(b"x")

        sender = threading.Thread(target=trickle)
        sender.start()
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            wire.receive_reply(ours, 1 << 16, soon(0.2))
        stop.set()
        sender.join()
        assert time.monotonic() - begun < 1


def test_hanging_up():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(EOFError):
            wire.receive_request(ours)
        with pytest.raises(OSError, match="pipe"):
            wire.send_request(ours, Request(Verb.FIND, 1), soon())
