from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.errors import ProtocolViolation
from preloadd.protocol.rendezvous.frames import (
    Frames,
    decode_from_convener,
    decode_from_member,
    encode,
)
from preloadd.protocol.rendezvous.messages import MAX_FRAME, Agreed, Beat, Done, Ended, Failed
from tests.unit.protocol.rendezvous.ranks import WILD, join

JOIN = join(3, key={"checkpoint": "full:00ff", "dtype": "float16", "model_config": '{"a":{"b":1}}'})
FROM_MEMBER = [JOIN, Beat(), Done(), Failed(why="it is gone")]
FROM_CONVENER = [Beat(missing=(1, 3)), Agreed(), Ended(why="nö")]


def frame(message) -> bytes:
    (found,) = Frames().receive(encode(message))
    return found


@pytest.mark.parametrize("message", FROM_MEMBER)
def test_what_a_member_says_arrives(message):
    assert decode_from_member(frame(message)) == message


@pytest.mark.parametrize("message", FROM_CONVENER)
def test_what_rank_0_says_arrives(message):
    assert decode_from_convener(frame(message)) == message


def test_sides_are_not_confused():
    with pytest.raises(ProtocolViolation):
        decode_from_convener(frame(JOIN))
    with pytest.raises(ProtocolViolation):
        decode_from_member(frame(Agreed()))


@given(st.data())
def test_frames_come_out_whole_however_they_are_cut(data):
    stream = b"".join(map(encode, FROM_MEMBER))
    cuts = data.draw(st.lists(st.integers(0, len(stream))).map(sorted))
    frames, found = Frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += frames.receive(stream[start:end])
    assert [decode_from_member(each) for each in found] == FROM_MEMBER


@pytest.mark.parametrize("nbytes", [0, MAX_FRAME + 1, 0x47455420])
def test_a_length_that_no_rank_sends_is_refused_at_once(nbytes):
    with pytest.raises(ProtocolViolation, match="no preloadd rank"):
        list(Frames().receive(nbytes.to_bytes(4, "big")))


@given(st.binary(max_size=200))
def test_garbage_is_a_violation_and_nothing_else(data):
    for decode in (decode_from_member, decode_from_convener):
        with suppress(ProtocolViolation):
            decode(data)


@pytest.mark.slow
@given(st.sampled_from(["join", "beat", "done", "failed"]), st.dictionaries(st.text(), WILD))
def test_wild_fields_are_a_violation_or_a_message(tag, fields):
    body = msgspec.msgpack.encode({**fields, "type": tag})
    with suppress(ProtocolViolation):
        decode_from_member(body)


def test_deep_nesting_is_a_violation():
    with pytest.raises(ProtocolViolation):
        decode_from_member(b"\x81\xa1x" + b"\x91" * 50_000)
