"""Filling from a peer where memory is of a device, and what is refused before a byte is taken.

The rest, over sockets that break and senders that die, is in tests/process/test_seeding_weights.py.
"""

import dataclasses
import socket
from contextlib import ExitStack, closing

import pytest

from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.errors import OutOfRoom
from preloadd.linux import seqpacket
from preloadd.loader.peer import Peer, Want, fill, fill_native
from preloadd.loader.race import Rule
from preloadd.loader.streams import PeerLost
from preloadd.memory.hip.driver import open_ordinal
from preloadd.memory.host import HostFiller
from preloadd.memory.vmm import VmmMapper
from preloadd.transport.blocking import Link
from tests.weights_peers import (
    HERE,
    Target,
    asking,
    checkpoint,
    content,
    loaded,
    serving,
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    model = ModelSettings(
        path=str(checkpoint(folder / "model", 10 << 20)), name="tests/model", chunk_bytes=9 << 20
    )
    return RankSettings(
        group="tests", instance="CPU-0", socket_dir=str(folder), derived=False, model=model
    )


@pytest.fixture(scope="module")
def generation(settings, tmp_path_factory):
    made = loaded(settings, tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


@pytest.fixture
def peer(settings, generation):
    """A peer with that generation, whatever the disk is like."""
    with closing(socket.socket()) as sock:
        sock.bind((HERE, 0))
        port = sock.getsockname()[1]
    with serving(settings, generation, port) as source, asking(source.where) as peer:
        yield peer


@pytest.fixture
def target(settings, generation):
    with closing(Target(settings, generation)) as target:
        yield target


def wanted(target, **more):
    return dataclasses.replace(Want(target.key, 10 << 20, 1.0, lambda _: None), **more)


def test_memory_of_a_device_is_filled_through_its_buffers(
    peer, target, generation, on_device, hip_library
):
    with target.reporting() as reporter:
        manifest, filled = fill(peer, wanted(target), on_device, reporter)
    assert manifest == generation.manifest
    assert filled.bytes_peer == sum(manifest.chunks)
    with closing(open_ordinal(0, hip_library)) as driver:
        copies = [
            (fd.duplicate(), nbytes) for fd, nbytes in zip(target.fds, manifest.chunks, strict=True)
        ]
        with closing(VmmMapper(driver).map(copies)) as mapping:
            found = [mapping.read(i, 0, nbytes) for i, nbytes in enumerate(manifest.chunks)]
    assert found == content(list(generation.chunks))


def test_chunks_that_this_memory_does_not_have_are_refused(peer, target, caplog):
    class Coarse(HostFiller):
        granularity = 3 << 20

    with target.reporting() as reporter:
        assert fill(peer, wanted(target), Coarse(), reporter) is None
    assert "not such as this memory has" in caplog.text


def test_no_room_is_no_fault_of_the_peer(peer, target):
    class Full(HostFiller):
        def create(self, nbytes):
            raise OutOfRoom(wanted=nbytes, free=0, limit="this test")

    with target.reporting() as reporter, pytest.raises(OutOfRoom):
        fill(peer, wanted(target), Full(), reporter)


def test_a_fault_that_is_found_by_the_caller_leaves_it_to_the_disk(peer, target, caplog):
    def fits(manifest):
        raise PeerLost(f"{len(manifest.chunks)} chunks are too many")

    with target.reporting() as reporter:
        assert fill(peer, wanted(target, fits=fits), HostFiller(), reporter) is None
    assert "2 chunks are too many" in caplog.text
    assert not target.fds


def test_without_a_rank_it_is_left_to_the_disk(target, caplog):
    ours, theirs = seqpacket.pair()
    with ExitStack() as undo:
        link = undo.enter_context(closing(Link(theirs)))
        ours.close()
        with target.reporting() as reporter:
            native = target.native
            peer = Peer(link, Rule(enough_s=0.0))
            assert fill_native(peer, native, target.key, HostFiller(), reporter) is None
    assert "no weights from a peer, they are read from the disk" in caplog.text
