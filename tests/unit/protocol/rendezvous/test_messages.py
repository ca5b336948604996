import msgspec
import pytest

from preloadd.errors import ProtocolViolation
from preloadd.protocol.rendezvous.frames import Frames, decode_from_member, encode
from preloadd.protocol.rendezvous.messages import MAX_FRAME, MAX_WORLD, Beat, Failed
from tests.unit.protocol.rendezvous.ranks import join


def heard(message):
    """What the other side makes of a message of a member."""
    (frame,) = Frames().receive(encode(message))
    return decode_from_member(frame)


def test_numbers_and_texts_are_bounded():
    for change in ({"rank": -1}, {"rank": MAX_WORLD + 1}, {"group": "g" * 257}):
        with pytest.raises(ProtocolViolation):
            heard(msgspec.structs.replace(join(3), **change))
    encode(Beat(missing=tuple(range(MAX_WORLD))))
    with pytest.raises(ProtocolViolation, match="65,536"):
        encode(join(3, key={"rope": "x" * MAX_FRAME}))
    with pytest.raises(ProtocolViolation, match="Unicode"):
        encode(Failed(why="\ud800"))


@pytest.mark.parametrize("never", [0.0, -1.0, float("nan")])
def test_nobody_is_lost_at_once(never):
    with pytest.raises(ProtocolViolation):
        heard(join(3, silence=never))


def test_a_rank_is_called_by_what_it_says_of_itself():
    assert str(join(3)) == "rank 3 of node 1"
    assert str(join(0, role="draft")) == "draft rank 0 of node 0"
    assert str(join(3, node=0, nodes=0)) == "rank 3"
