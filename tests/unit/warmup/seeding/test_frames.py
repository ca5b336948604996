import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.errors import ProtocolViolation
from preloadd.warmup.seeding.frames import MAX_REQUEST, Frame, framed


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 320), max_size=8))
def test_a_message_arrives_whole_however_it_is_cut(body, cuts):
    sent = framed(body)
    frame = Frame(MAX_REQUEST)
    edges = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    pieces = [sent[a:b] for a, b in itertools.pairwise(edges)]
    assert [frame.receive(piece) for piece in pieces] == [None] * (len(pieces) - 1) + [body]


def test_the_length_is_that_of_vllm():
    assert framed(b"{}") == b"\0\0\0\0\0\0\0\x02{}"


@pytest.mark.parametrize("length", [0, 11, 1 << 26, (1 << 64) - 1])
def test_a_length_is_refused_before_anything_follows_it(length):
    with pytest.raises(ProtocolViolation, match="1 to 10 are read"):
        Frame(10).receive(length.to_bytes(8, "big"))


def test_the_longest_is_read():
    assert Frame(10).receive(framed(b"x" * 10)) == b"x" * 10


def test_a_second_message_is_refused():
    with pytest.raises(ProtocolViolation, match="after the one message"):
        Frame(10).receive(framed(b"{}") + b"\0")


def test_http_is_told_from_it():
    with pytest.raises(ProtocolViolation, match="are read"):
        Frame(MAX_REQUEST).receive(b"GET / HTTP/1.1\r\n")
