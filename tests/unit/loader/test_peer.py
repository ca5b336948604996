"""Filling from a peer where memory is of a device, and what is refused before a byte is taken.

The rest, over sockets that break and senders that die, is in tests/process/test_seeding_weights.py.
"""

import dataclasses
import os
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest
from blake3 import blake3

from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.errors import OutOfRoom
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.loader import peer as of
from preloadd.loader.peer import Peer, Want, fill, fill_native
from preloadd.loader.race import Rule
from preloadd.loader.streams import PeerLost
from preloadd.memory.hip.driver import open_ordinal
from preloadd.memory.host import HostFiller
from preloadd.memory.vmm import VmmMapper
from preloadd.protocol import codec, payload
from preloadd.protocol.peering import REQUEST_NBYTES, PeerGiven
from preloadd.transport.blocking import Link
from tests.ports import free_port
from tests.weights_peers import (
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
    with serving(settings, generation, free_port()) as source, asking(source.where) as peer:
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


def test_a_rank_that_finds_no_further_streams_is_not_waited_for(target, generation, caplog):
    """The source gives its manifest and goes away; the rank says nothing any more."""
    rule = Rule(enough_s=0.0, trial_s=30.0, least_s=1.0)
    ours, theirs = seqpacket.pair()
    near, far = socket.socketpair()
    manifest = read_sealed(generation.sealed.fileno(), payload.MAX_NBYTES)
    given = PeerGiven(
        generation=generation.manifest.generation,
        manifest=len(manifest),
        chunks=generation.manifest.chunks,
    )

    def rank():
        with closing(Link(ours)) as end, far:
            end.receive().close()
            with OwnedFd(near.detach()) as stream:
                end.send(codec.encode(given), [stream])
            far.recv(REQUEST_NBYTES)
            far.sendall(manifest + blake3(manifest).digest())
            far.close()
            while not end.receive().eof:
                pass

    with ExitStack() as undo:
        thread = threading.Thread(target=rank)
        thread.start()
        undo.callback(thread.join)
        link = undo.enter_context(closing(Link(theirs)))
        begun = time.monotonic()
        with target.reporting() as reporter:
            about = wanted(target, disk=float(1 << 30))
            assert fill(Peer(link, rule), about, HostFiller(), reporter) is None
        assert time.monotonic() - begun < 3
    assert "no weights from a peer, they are read from the disk" in caplog.text


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


def test_a_rank_whose_streams_are_none_leaves_it_to_the_disk(target, caplog):
    ours, theirs = seqpacket.pair()
    given = PeerGiven(generation="0" * 32, manifest=1, chunks=(1,))
    with ExitStack() as undo:
        end, link = (undo.enter_context(closing(Link(sock))) for sock in (ours, theirs))
        near, far = (OwnedFd(sock.detach()) for sock in socket.socketpair())
        undo.callback(near.close)
        undo.callback(far.close)
        other = undo.enter_context(OwnedFd(os.open(os.devnull, os.O_RDONLY)))
        end.send(codec.encode(given), [near, other])
        with target.reporting() as reporter:
            peer = Peer(link, Rule(enough_s=0.0))
            filled = fill_native(peer, target.native, target.key, HostFiller(), reporter)
    assert filled is None
    assert "the rank could not ask: no socket: " in caplog.text


@pytest.mark.parametrize("dripping", [False, True])
def test_a_peer_that_gives_no_manifest_leaves_it_to_the_disk(target, caplog, monkeypatch, dripping):
    monkeypatch.setattr(of, "MANIFEST_S", 0.2)
    ours, theirs = seqpacket.pair()
    with ExitStack() as undo:
        link = undo.enter_context(closing(Link(theirs)))
        pairs = [socket.socketpair() for _ in range(4)]
        for near, far in pairs:
            undo.callback(far.close)
            undo.callback(near.close)
        ended = threading.Event()

        def rank():
            with closing(Link(ours)) as end:
                while not (packet := end.receive()).eof:
                    packet.close()
                    copies = [OwnedFd.copy_of(near.fileno()) for near, _ in pairs]
                    end.send(
                        codec.encode(PeerGiven(generation="g", manifest=999, chunks=(1,))), copies
                    )
                    for copy in copies:
                        copy.close()

        def drip():
            with suppress(OSError):
                while dripping and not ended.wait(0.02):
                    for _, far in pairs:
                        far.send(b"x")

        threads = [threading.Thread(target=work) for work in (rank, drip)]
        for thread in threads:
            thread.start()
            undo.callback(thread.join)
        undo.callback(link.close)
        undo.callback(ended.set)
        begun = time.monotonic()
        with target.reporting() as reporter:
            asked = Peer(link, Rule(enough_s=0.0))
            assert fill(asked, wanted(target), HostFiller(), reporter) is None
        assert time.monotonic() - begun < 2
    assert "read from the disk: it sends too slowly" in caplog.text
