"""Room that is there, that will be, and that comes late."""

import re

import pytest

from preloadd.errors import OutOfRoom
from preloadd.loader import room
from preloadd.loader.room import await_room, require_room
from tests.unit.loader.staged import StagedFiller


class Freeing(StagedFiller):
    """Has another byte each time it is asked how many are free, up to `most`."""

    def __init__(self, most):
        super().__init__()
        self.free, self.most, self.told = 0, most, 0

    def room(self):
        self.told += 1
        return super().room()

    def available(self):
        self.free = min(self.free + 1, self.most)
        return self.free


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(room, "_FREED_S", 0.2)
    monkeypatch.setattr(room, "_POLL_S", 0.001)


def test_what_will_be_freed_is_told_apart_from_who_has_the_rest():
    filler = StagedFiller()
    filler.free = 1000
    assert require_room(filler, 1500, freed=500) == 1500
    told = (
        "need 1,501 bytes but GPU-0 (a stand-in), where pid 7 (python) holds 1.0 GiB, once the 500 "
        "bytes of the weights before are gone, leaves 1,500, so 1 are missing"
    )
    with pytest.raises(OutOfRoom, match=re.escape(told)):
        require_room(filler, 1501, freed=500)


@pytest.mark.parametrize(("wanted", "hoped", "free"), [(9, 0, 9), (0, 9, 9), (3, 9, 9), (9, 3, 9)])
def test_room_is_waited_for_and_who_has_the_rest_asked_once(wanted, hoped, free):
    filler = Freeing(20)
    await_room(filler, wanted, hoped=hoped)
    assert (filler.free, filler.told) == (free, 1)


def test_what_is_hoped_for_need_not_come():
    await_room(Freeing(5), 5, hoped=9)
    with pytest.raises(OutOfRoom, match="need another 6 bytes"):
        await_room(Freeing(5), 6, part=True, hoped=9)
