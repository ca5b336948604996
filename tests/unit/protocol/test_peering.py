"""What is said about weights that come from a peer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.settings import Memory
from preloadd.errors import ProtocolViolation
from preloadd.protocol import codec, peering
from preloadd.protocol.messages import Proceed

ASKED = peering.PeerAsked(key="ab" * 32, streams=4, within=1.5)
GIVEN = peering.PeerGiven(generation="0a" * 16, manifest=7, chunks=(4096, 8192))
ABSENT = peering.PeerAbsent(why="it has none")
ORDER = peering.ToSend(memory=Memory.HOST, device="CPU-0", manifest=7, chunks=(4096,))
OPENED = peering.StreamOpened()

DECODED = [
    (peering.decode_asked, ASKED),
    (peering.decode_told, GIVEN),
    (peering.decode_told, ABSENT),
    (peering.decode_order, ORDER),
    (peering.decode_order, OPENED),
]


@pytest.mark.parametrize(("decode", "message"), DECODED)
def test_what_is_said_is_heard(decode, message):
    assert decode(codec.encode(message)) == message


@pytest.mark.parametrize("decode", [decode for decode, _ in DECODED])
@pytest.mark.parametrize("message", [ASKED, GIVEN, ORDER, OPENED, Proceed()])
def test_nothing_else_is_heard(decode, message):
    if (decode, type(message)) in [(one, type(other)) for one, other in DECODED]:
        return
    with pytest.raises(ProtocolViolation):
        decode(codec.encode(message))


@given(data=st.binary(max_size=64))
@pytest.mark.parametrize("decode", [decode for decode, _ in DECODED])
def test_noise_is_a_violation(decode, data):
    with pytest.raises(ProtocolViolation):
        decode(data)


@given(place=st.builds(peering.PieceRequest, *[st.integers(0, 0xFFFFFFFF)] * 3))
def test_places_come_back(place):
    encoded = place.encode()
    assert len(encoded) == peering.REQUEST_NBYTES
    assert peering.PieceRequest.decode(encoded) == place


@given(nbytes=st.integers(1, 1 << 40))
def test_pieces_cover_a_chunk(nbytes):
    count = peering.pieces(nbytes)
    last = peering.piece_nbytes(nbytes, count - 1)
    assert 0 < last <= peering.PIECE
    assert (count - 1) * peering.PIECE + last == nbytes
    for piece in (-1, count):
        with pytest.raises(ProtocolViolation):
            peering.piece_nbytes(nbytes, piece)
