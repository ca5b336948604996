"""Real servers that are slow, huge, rude or no servers at all."""

import socket
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preloadd.domain.endpoint import Endpoint
from preloadd.errors import PreloadError, ProtocolViolation, Unavailable
from preloadd.transport import web
from tests.http_stand_in import response, serving
from tests.ports import free_port

LIMIT = 1 << 16


def get(endpoint: Endpoint, *, timeout: float = 5.0, limit: int = LIMIT) -> bytes:
    return web.get(endpoint, "/v1/node", timeout=timeout, limit=limit)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_answer_with_its_length(host):
    with serving(response(b"{}"), host) as endpoint:
        assert get(endpoint) == b"{}"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\nyes",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\ny\r\n2\r\nes\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes and no",
    ],
)
def test_other_ways_to_answer(answer):
    with serving(answer) as endpoint:
        assert get(endpoint) == b"yes"


def test_a_name_is_asked_at_each_of_its_addresses():
    """Nobody listens on ::1, the first address of most hosts' localhost."""
    with serving(response(b"{}")) as endpoint:
        assert get(Endpoint("localhost", endpoint.port)) == b"{}"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (response(b"", status="302 Found", more="Location: http://x/\r\n"), "redirects (302)"),
        (response(b"", status="404 Not Found"), "404: no supervisor of preloadd"),
        (response(b"<b>", status="503 \x1b[2J"), "it answers 503"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP"),
        (b"\x00" * 100 + b"\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n", "no HTTP"),
        (response(b"x" * LIMIT), "longer than 64.0 KiB"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000000000\r\n\r\n", "longer than 64.0 KiB"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * LIMIT * 2, "no HTTP|longer than"),
    ],
)
def test_wrong_answers_are_told_in_our_words(answer, said):
    with serving(answer) as endpoint, pytest.raises(ProtocolViolation) as caught:
        get(endpoint)
    assert any(part in str(caught.value) for part in said.split("|"))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
    ],
)
def test_who_hangs_up_early_is_told_as_such(answer):
    with serving(answer) as endpoint, pytest.raises(Unavailable, match="hung up before the end"):
        get(endpoint)


def _drip(client, over):
    """A byte now and then: no single wait is long."""
    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while not over.wait(0.02):
        client.sendall(b"x")


def _say_nothing(client, over):
    over.wait(10)


def _pour(client, over):
    client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffff\r\n")
    for _ in range(1000):
        client.sendall(b"x" * (1 << 17))


@pytest.mark.parametrize("act", [_drip, _say_nothing])
def test_the_deadline_is_for_the_whole_answer(act):
    began = time.monotonic()
    with serving(act) as endpoint, pytest.raises(Unavailable, match=r"^no answer within 0\.2 s$"):
        get(endpoint, timeout=0.2)
    assert time.monotonic() - began < 1.5


def test_what_claims_to_be_endless_is_neither_taken_nor_made_room_for():
    with serving(_pour) as endpoint, pytest.raises(ProtocolViolation, match="longer than"):
        get(endpoint)


def test_an_address_that_takes_no_connection_leaves_time_for_the_next():
    """A full backlog swallows connections, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        try:
            for sock in waiting:
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
            with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
                get(Endpoint("127.0.0.1", port), timeout=0.2)
        finally:
            for sock in waiting:
                sock.close()


def test_nobody_listens():
    endpoint = Endpoint("127.0.0.1", free_port())
    with pytest.raises(Unavailable, match=r"^connection refused$"):
        get(endpoint)


def test_a_name_that_nobody_knows():
    with pytest.raises(Unavailable, match="name cannot be resolved"):
        get(Endpoint("no-such-host.invalid", 1))
    with pytest.raises(Unavailable, match="name cannot be resolved"):
        get(Endpoint("a" * 70, 1))


class _Once:
    """The same server for all examples, each with an answer of its own."""

    def __init__(self) -> None:
        self.answer = b""

    def __call__(self, client, over):
        client.sendall(self.answer)


PIECES = st.sampled_from(
    [b"HTTP/1.1 200 OK\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"-1", b"\r\n"]
)


@pytest.mark.slow
def test_whatever_comes_is_a_body_or_an_error_of_ours():
    @settings(max_examples=150)
    @given(st.lists(PIECES | st.binary(max_size=20), max_size=12).map(b"".join))
    def check(answer):
        once.answer = answer
        with suppress(PreloadError):
            assert len(get(endpoint, limit=200)) <= 200

    once = _Once()
    with serving(once) as endpoint:
        check()
