import json
import os
import sys
import time
from dataclasses import replace

import pytest

import preloadd.loader
from preloadd.domain.recipe import recipe_of
from preloadd.domain.settings import Builder, Digest, Layout, Memory, Reader, Rendezvous
from preloadd.errors import CheckpointError, ConfigError, DeviceFailed, OutOfRoom
from preloadd.linux.memfd import read_sealed
from preloadd.loader.pipeline import load
from preloadd.loader.report import Reporter
from preloadd.memory.host import HostFiller
from preloadd.protocol import codec, payload
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Link
from preloadd.weights.checkpoint import content, identities_of, open_checkpoint
from tests.checkpoints import CONFIG, SHARDS, sparse, stored
from tests.unit.loader.staged import StagedFiller


@pytest.fixture
def loaded(ends):
    """Loads, and gives what the rank has heard of it."""
    rank, sock = ends

    def loaded(settings, digest_cache=None, filler=None, frees=None):
        link = Link(sock)
        try:
            reporter = Reporter(link, clock=time.monotonic)
            reporter.frees = frees
            load(settings, filler or HostFiller(), reporter, digest_cache=digest_cache)
        finally:
            link.close()
        return rank.heard()

    return loaded


@pytest.mark.slow
def test_a_python_without_vllm_is_named_with_what_it_lacks(loaded, settings_of, model):
    wanted = settings_of(model, builder=Builder.VLLM, layout=Layout.PLAIN)
    with pytest.raises(ConfigError) as caught:
        loaded(wanted)
    assert f"{sys.executable} lacks the package vllm: install it there" in str(caught.value)
    assert "(--python, or `python` in the group's file)" in str(caught.value)


@pytest.fixture
def manifest(ends):
    """The manifest that came last."""
    rank, _ = ends
    return lambda: payload.decode(read_sealed(rank.fds[-1].fileno(), payload.MAX_NBYTES))


def test_where_ranks_meet_first_nothing_is_filled_before_they_agree(loaded, settings, ends):
    place = Rendezvous("127.0.0.1", 29700, rank=0, world=2, node=0, nodes=2)
    ends[0].link.send(codec.encode(m.Proceed()))
    heard = loaded(replace(settings, rendezvous=place))
    kinds = [type(report) for report in heard if not isinstance(report, m.Progress)]
    assert kinds[:2] == [m.Identified, m.ChunkFilled]
    phases = [report.phase for report in heard if isinstance(report, m.Progress)]
    assert list(dict.fromkeys(phases)) == ["opening", "identifying", "loading"]
    manifest = payload.decode(read_sealed(ends[0].fds[-1].fileno(), payload.MAX_NBYTES))
    (told,) = [report.key for report in heard if isinstance(report, m.Identified)]
    assert manifest.key == told


@pytest.mark.parametrize("frees", [0, 1 << 20])
def test_what_is_replaced_is_given_up_before_anything_is_filled(loaded, settings, ends, frees):
    ends[0].link.send(codec.encode(m.Proceed()))
    heard = loaded(settings, frees=frees)
    reports = [report for report in heard if not isinstance(report, m.Progress)]
    assert reports[0] == m.Identified(key={})
    assert isinstance(reports[1], m.ChunkFilled)


@pytest.mark.parametrize("frees", [0, 4 << 40])
def test_nothing_is_given_up_for_what_has_no_room_even_then(
    loaded, settings_of, tmp_path, ends, monkeypatch, frees
):
    monkeypatch.setattr("preloadd.loader.room._FREED_S", 0.1)
    ends[0].link.send(codec.encode(m.Proceed()))
    with pytest.raises(OutOfRoom, match="the weights need"):
        loaded(settings_of(sparse(tmp_path / "huge", 2 << 40, tensors=128)), frees=frees)
    told = [type(report) for report in ends[0].heard()]
    # What was promised, and has not come, is waited for.
    assert (m.Identified in told) is (frees > 0)


def test_a_load_tells_its_phases_hands_over_chunks_and_ends_with_the_manifest(loaded, settings):
    heard = loaded(settings)
    phases = [report.phase for report in heard if isinstance(report, m.Progress)]
    assert list(dict.fromkeys(phases)) == ["opening", "loading", "identifying"]
    chunks = [report for report in heard if isinstance(report, m.ChunkFilled)]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert len(chunks) > 3
    assert isinstance(heard[-1], m.ManifestWritten)
    assert [type(report) for report in heard].count(m.ManifestWritten) == 1
    last = [report for report in heard if getattr(report, "phase", "") == "loading"][-1]
    assert last.done == last.total > 0


def test_the_chunks_hold_the_checkpoint_as_the_manifest_describes_it(
    loaded, manifest, settings, model, ends
):
    loaded(settings)
    found = manifest()
    chunks = ends[0].fds[:-1]
    assert [os.fstat(fd.fileno()).st_size for fd in chunks] == list(found.chunks)
    tensors = {}
    for name in found.tensors.name:
        chunk, offset, nbytes = found.locate(name)
        tensors[name] = os.pread(chunks[chunk].fileno(), nbytes, offset)
    assert tensors == stored(model)


def test_the_manifest_tells_where_it_all_comes_from(loaded, manifest, settings, model):
    loaded(settings)
    found = manifest()
    checkpoint = open_checkpoint(model)
    nbytes = sum(map(len, stored(model).values()))
    assert found.recipe == recipe_of(settings, identities_of(model))
    assert found.key["checkpoint"] == content(checkpoint, Digest.SAMPLED, None)
    assert found.backend == "host"
    assert found.shards == tuple(sorted(checkpoint.weights_identities()))
    assert (found.counters["bytes_read"], found.counters["files"]) == (nbytes, len(SHARDS))
    assert found.counters["bytes_direct"] == 0
    assert 0 <= found.counters["fill_ms"] <= found.counters["load_ms"]
    (config,) = found.artifacts
    assert (config.kind, config.name, json.loads(config.data)) == ("config", "config.json", CONFIG)


def test_every_load_makes_another_generation(loaded, manifest, settings, ends):
    loaded(settings)
    assert len(manifest().generation) == 32
    assert int(manifest().generation, 16)


def test_a_full_digest_is_told_as_it_goes_on_and_kept(
    loaded, manifest, settings_of, model, tmp_path
):
    settings = settings_of(model, digest=Digest.FULL)
    heard = loaded(settings, digest_cache=tmp_path / "digests")
    told = [report for report in heard if getattr(report, "phase", "") == "identifying"]
    assert told[0].done == 0
    assert told[-1].done == told[-1].total
    assert manifest().key["checkpoint"].startswith("full-1:")
    assert len(list((tmp_path / "digests").glob("*.json"))) == len(SHARDS)


def test_a_lack_of_memory_is_said_before_anything_is_allocated(loaded, settings_of, tmp_path, ends):
    huge = settings_of(sparse(tmp_path / "huge", 2 << 40, tensors=128))
    with pytest.raises(OutOfRoom) as refused:
        loaded(huge)
    assert refused.value.wanted == 2 << 40
    assert refused.value.free < 2 << 40
    assert not ends[0].fds
    assert [report.phase for report in ends[0].heard()] == ["opening"]


def test_a_damaged_checkpoint_is_said_before_anything_is_allocated(loaded, settings, model, ends):
    (model / SHARDS[0]).write_bytes(b"")
    with pytest.raises(CheckpointError, match=SHARDS[0]):
        loaded(settings)
    assert not ends[0].fds


def test_what_bounds_a_gpu_and_who_holds_it_is_said(loaded, settings, ends):
    filler = StagedFiller()
    filler.free = 1000
    with pytest.raises(
        OutOfRoom, match=r"weights need \d+,\d+ bytes but GPU-0 .*pid 7 \(python\).*1,000"
    ):
        loaded(settings, filler=filler)
    assert filler.events == [("close filler",)]


@pytest.mark.parametrize("staged", [False, True])
def test_a_filler_is_closed_after_its_chunks_and_the_manifest(
    loaded, settings, manifest, model, ends, staged
):
    filler = StagedFiller() if staged else Closed()
    loaded(settings, filler=filler)
    assert filler.events[-1] == ("close filler",)
    if staged:
        assert filler.events[-2][0] == "close"
    assert manifest().counters["bytes_read"] == sum(map(len, stored(model).values()))


def test_a_device_that_is_lost_is_what_the_load_fails_with(loaded, settings, ends):
    filler = StagedFiller()
    filler.fails = DeviceFailed("GPU-0: CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(DeviceFailed, match="LAUNCH_FAILED"):
        loaded(settings, filler=filler)
    assert filler.events[-1] == ("close filler",)
    assert not any(isinstance(report, m.ChunkFilled) for report in ends[0].heard())


def test_a_reader_that_is_not_installed_is_said_before_anything_is_given_up(
    loaded, settings_of, model, monkeypatch, ends
):
    monkeypatch.setitem(sys.modules, "instanttensor", None)
    monkeypatch.delitem(sys.modules, "preloadd.loader.instant", raising=False)
    monkeypatch.delattr(preloadd.loader, "instant", raising=False)
    settings = settings_of(model, reader=Reader.INSTANTTENSOR, memory=Memory.CUDA)
    with pytest.raises(ConfigError, match=r"install instanttensor .*reader = \"pread\""):
        loaded(settings, filler=StagedFiller(), frees=0)
    assert m.Identified(key={}) not in ends[0].heard()


class Closed(HostFiller):
    """A filler of the host that says when it is closed."""

    def __init__(self):
        self.events = []

    def close(self):
        self.events.append(("close filler",))
        super().close()


def test_a_rank_that_is_gone_ends_the_load(loaded, settings, ends):
    ends[0].link.close()
    with pytest.raises(BrokenPipeError):
        loaded(settings)
