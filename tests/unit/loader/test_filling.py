import os

import pytest

from preloadd.errors import DeviceFailed, OutOfRoom, ReadFailed
from preloadd.loader.filling import fill
from preloadd.loader.native import Native
from preloadd.loader.report import Reporter
from preloadd.memory.host import HostFiller
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Link
from tests.checkpoints import SHARDS, rewrite, stored
from tests.unit.loader.staged import StagedFiller


@pytest.fixture
def native(settings):
    return Native(settings, 4096)


@pytest.fixture
def filled(ends, native):
    """Fills; what it cost and what the rank has heard of it."""
    rank, sock = ends

    def filled(filler):
        link = Link(sock)
        try:
            cost = fill(native, filler, Reporter(link, clock=lambda: 0.0))
        finally:
            link.close()
        return cost, rank.heard()

    return filled


@pytest.mark.parametrize("filler", [HostFiller, StagedFiller])
def test_every_tensor_is_in_its_place(filled, native, model, ends, filler):
    cost, heard = filled(filler())
    told = [(each.index, each.nbytes) for each in heard if isinstance(each, m.ChunkFilled)]
    assert told == list(enumerate(native.plan.chunks))
    places = native.plan.storages
    found = {
        name: os.pread(
            ends[0].fds[places.chunk[row]].fileno(), places.nbytes[row], places.offset[row]
        )
        for row, name in enumerate(native.plan.tensors.name)
    }
    assert found == stored(model)
    assert cost.bytes_read == native.plan.tensor_nbytes
    assert cost.seconds > 0


def test_a_chunk_is_finished_before_it_is_handed_over_and_after_the_next_was_made(filled, native):
    filler = StagedFiller()
    filled(filler)
    kinds = [kind for kind, *_ in filler.events]
    last = len(native.plan.chunks)
    assert kinds == [
        "create",
        *["create", "finish"] * (last - 1),
        "finish",
        *["close"] * last,
    ]


@pytest.mark.parametrize("error", [DeviceFailed("lost"), OutOfRoom(wanted=1, free=0, limit="it")])
def test_what_a_device_says_ends_it_and_closes_all(filled, ends, error):
    filler = StagedFiller()
    filler.fails = error
    with pytest.raises(type(error)):
        filled(filler)
    assert not ends[0].fds


def test_a_file_that_changes_meanwhile_is_named(filled, native, model):
    class Changing(StagedFiller):
        def create(self, nbytes):
            rewrite(model / SHARDS[2], (model / SHARDS[2]).read_bytes())
            return super().create(nbytes)

    with pytest.raises(ReadFailed, match=f"{SHARDS[2]} changed while"):
        filled(Changing())
