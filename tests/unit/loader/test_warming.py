"""What a loader tells of tables, and when it tunes; FlashInfer itself is in tests/engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from preloadd.domain.dtypes import CODES
from preloadd.domain.manifest import Manifest
from preloadd.domain.settings import Memory, RankSettings, Rendezvous, Warmup
from preloadd.errors import ProtocolViolation
from preloadd.frameworks.tables import config_hash
from preloadd.linux import seqpacket
from preloadd.loader import warming
from preloadd.loader.autotune.tuning import NotTuned, TableFile
from preloadd.loader.pipeline import load
from preloadd.loader.report import Reporter
from preloadd.loader.warming import TUNING, warm_up
from preloadd.memory.host import HostFiller
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Link
from preloadd.warmup.names import OVERRIDE
from tests.tuned import H200

A = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"


@pytest.fixture
def settings(settings_of, model) -> RankSettings:
    made = settings_of(model, chunk_bytes=1 << 20, memory=Memory.CUDA, instance=A)
    return replace(made, warmup=Warmup(autotune=True, deadline=10.0))


@pytest.fixture
def manifest(settings_of, model) -> Manifest:
    """That of a real load, with its weights said to be of a kind that is tuned."""
    ours, theirs = seqpacket.pair()
    with ours, theirs:
        reporter = Reporter(Link(theirs), clock=time.monotonic)
        loaded = load(settings_of(model), HostFiller(), reporter, digest_cache=None)
    codes = [CODES["BF16"]] * len(loaded)
    return replace(loaded, tensors=replace(loaded.tensors, dtype=codes))


class Talk:
    """A rank that answers `Warmable` with what the test says, and takes down all it hears."""

    def __init__(self, link: Link, answer: m.Message | None) -> None:
        self.heard: list[m.Message] = []
        self._link, self._answer = link, answer

    def listen(self) -> None:
        while not (packet := self._link.receive()).eof:
            packet.close()
            report = codec.decode_report(packet.data)
            self.heard.append(report)
            if isinstance(report, m.Warmable) and report.tunes and self._answer is not None:
                self._link.send(codec.encode(self._answer))

    @property
    def warm(self) -> list[m.Message]:
        """What it heard of tables."""
        return [one for one in self.heard if isinstance(one, (m.Warmable, m.Tuned))]


@pytest.fixture
def talk(ends, manifest) -> Callable:
    """Warms up, with a rank that says `answer`; what that rank heard."""
    rank, sock = ends

    @contextmanager
    def listening(answer: m.Message | None) -> Iterator[Talk]:
        talk = Talk(rank.link, answer)
        thread = threading.Thread(target=talk.listen)
        thread.start()
        yield talk
        thread.join()

    def talk(settings: RankSettings, answer: m.Message | None = None, environ=None) -> Talk:
        with listening(answer) as heard:
            link = Link(sock)
            try:
                reporter = Reporter(link, clock=time.monotonic)
                warm_up(settings, manifest, reporter, environ or {OVERRIDE: "/srv/tables"})
            finally:
                link.close()
        return heard

    return talk


@pytest.fixture
def on_h200(monkeypatch) -> SimpleNamespace:
    """A loader that sees an H200 with FlashInfer; `tune` is what tunes."""
    chosen = SimpleNamespace(tune=lambda *_: (21, 14), TableFile=TableFile)
    monkeypatch.setattr(warming, "find_spec", lambda _: object())
    monkeypatch.setattr(warming.gemms, "why_not", lambda _: "")
    monkeypatch.setattr(warming, "environment", lambda: dict(H200))
    monkeypatch.setattr(warming, "tuning", chosen)
    return chosen


def test_nothing_is_told_where_it_is_switched_off(talk, settings):
    assert talk(replace(settings, warmup=Warmup(autotune=False))).warm == []


REASONS = {
    "host": ({"memory": Memory.HOST}, {"instance": "CPU-0"}, "in host memory"),
    "hip": ({"memory": Memory.HIP}, {}, "is for NVIDIA's GPUs"),
    "draft": ({}, {"instance": f"{A}.draft"}, "drafts are not tuned"),
}


@pytest.mark.parametrize(("memory", "rank", "why"), REASONS.values(), ids=REASONS)
def test_why_nothing_is_tuned_is_told(talk, settings, memory, rank, why):
    changed = replace(settings, model=replace(settings.model, **memory), **rank)
    (told,) = talk(changed).warm
    assert not told.tunes
    assert why in told.why_not


def test_a_python_without_flashinfer_is_named(talk, settings, monkeypatch):
    monkeypatch.setattr(warming, "find_spec", lambda _: None)
    (told,) = talk(settings).warm
    assert "FlashInfer is not installed for /" in told.why_not
    assert "install flashinfer-python there" in told.why_not


def test_a_gpu_that_is_too_old_is_told(talk, settings, on_h200, monkeypatch):
    monkeypatch.setattr(warming.gemms, "why_not", lambda _: "this GPU has 8.0")
    (told,) = talk(settings).warm
    assert told == m.Warmable(why_not="this GPU has 8.0")


def test_a_flashinfer_that_cannot_be_used_is_told(talk, settings, on_h200, monkeypatch):
    def broken(_):
        raise RuntimeError("cubins of another version\nsee there")

    monkeypatch.setattr(warming.gemms, "why_not", broken)
    (told,) = talk(settings).warm
    assert told.why_not.startswith("FlashInfer cannot be used: RuntimeError: cubins of another")
    assert "\n" not in told.why_not


def test_a_model_without_such_layers_is_told(settings, ends, manifest, on_h200):
    rank, sock = ends
    bare = replace(manifest, tensors=type(manifest.tensors)([], [], [], [], [], [], []))
    link = Link(sock)
    warm_up(settings, bare, Reporter(link, clock=time.monotonic), {})
    link.close()
    *_, told = rank.heard()
    assert "no layer of this model" in told.why_not


def test_what_is_looked_for_is_told_and_nothing_tuned_unless_wanted(
    talk, settings, on_h200, manifest
):
    heard = talk(settings, m.Tune(wanted=False))
    assert heard.warm == [
        m.Warmable(
            config_hash=config_hash(manifest.key),
            root="/srv/tables",
            ranks=((0, 0),),
            metadata=H200,
            tunes=True,
        )
    ]


def test_ranks_of_other_hosts_have_their_tables_there(talk, settings, on_h200, manifest):
    manifest.key["tp_size"] = "2"
    here = talk(settings, m.Tune(wanted=False)).warm[0]
    assert here.ranks == ((0, 0), (0, 1))


def test_of_a_group_on_several_hosts_the_own_alone_is_looked_for(talk, settings, on_h200, manifest):
    manifest.key["tp_size"] = "2"
    place = Rendezvous("192.0.2.1", 29600, rank=0, world=2, node=0, nodes=2)
    told = talk(replace(settings, rendezvous=place), m.Tune(wanted=False)).warm[0]
    assert told.ranks == ((0, 0),)


def test_tuning_is_told_with_its_progress(talk, settings, on_h200):
    def tune(found, device, place, tell):
        tell(1, len(found))
        assert (device, str(place.root)) == ("cuda:0", "/srv/tables")
        return 42, 28

    on_h200.tune = tune
    heard = talk(settings, m.Tune(wanted=True))
    _, tuned = heard.warm
    assert (tuned.entries, tuned.hits, tuned.failure) == (42, 28, "")
    assert tuned.seconds > 0
    phases = [one.phase for one in heard.heard if isinstance(one, m.Progress)]
    assert phases[-1] == TUNING


FAILURES = {
    "ours": (NotTuned("FlashInfer kept its defaults"), "FlashInfer kept its defaults"),
    "theirs": (RuntimeError("nvcc\nis not there"), "RuntimeError: nvcc\\nis not there"),
    "out of memory": (MemoryError("40 GiB"), "MemoryError: 40 GiB"),
    "long": (RuntimeError("x" * 9000), "RuntimeError: xxx"),
}


@pytest.mark.parametrize(("error", "told"), FAILURES.values(), ids=FAILURES)
def test_whatever_is_raised_is_told_and_no_failed_load(talk, settings, on_h200, error, told):
    def tune(*_):
        raise error

    on_h200.tune = tune
    _, tuned = talk(settings, m.Tune(wanted=True)).warm
    assert tuned.failure.startswith(told)
    assert len(tuned.failure) <= 500


def test_a_rank_that_says_something_else_ends_it(talk, settings, on_h200):
    with pytest.raises(ProtocolViolation):
        talk(settings, m.Proceed())


def test_a_rank_that_says_nothing_is_not_waited_for_for_ever(talk, settings, on_h200):
    on_h200.tune = lambda *_: pytest.fail("nobody has said so")
    limited = replace(settings, warmup=Warmup(autotune=True, deadline=0.1))
    assert len(talk(limited, None).warm) == 1


def test_a_rank_that_is_gone_ends_it(settings, manifest, on_h200):
    ours, theirs = seqpacket.pair()
    with ours, theirs:
        reporter = Reporter(Link(theirs), clock=time.monotonic)
        ours.close()
        with pytest.raises((ConnectionError, ProtocolViolation)):
            warm_up(settings, manifest, reporter, {OVERRIDE: "/srv"})
