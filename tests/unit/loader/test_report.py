import os

import pytest

from preloadd.errors import CheckpointError, ProtocolViolation
from preloadd.linux.memfd import read_sealed
from preloadd.loader.report import EVERY_S, Reporter, Tally
from preloadd.memory.host import HostFiller
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Link


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def reporter(ends, now):
    _, sock = ends
    return Reporter(Link(sock), clock=lambda: now[0])


@pytest.fixture
def heard(ends):
    """What the rank has heard; the reporter hangs up for it."""
    rank, sock = ends

    def heard():
        sock.close()
        return rank.heard()

    return heard


def test_the_order_is_what_the_rank_says(reporter, ends, settings):
    ends[0].order(settings)
    assert reporter.order() == m.Order(settings=settings)


def test_a_rank_that_is_gone_or_says_something_else_breaks_the_protocol(reporter, ends):
    rank, _ = ends
    rank.link.send(b"\x01noise")
    with pytest.raises(ProtocolViolation, match="not an order"):
        reporter.order()
    rank.link.close()
    with pytest.raises(ProtocolViolation, match="gone before it said what to load"):
        reporter.order()


def test_what_was_identified_is_told_and_an_answer_awaited(reporter, ends):
    rank, _ = ends
    rank.link.send(codec.encode(m.Proceed()))
    reporter.identified({"dtype": "float16"})
    packet = rank.link.receive()
    assert codec.decode_report(packet.data) == m.Identified(key={"dtype": "float16"})


def test_no_leave_to_proceed_breaks_the_protocol(reporter, ends):
    rank, _ = ends
    rank.link.send(codec.encode(m.Progress(phase="x")))
    with pytest.raises(ProtocolViolation, match="the leave to proceed"):
        reporter.identified({})
    rank.link.close()
    with pytest.raises((ProtocolViolation, OSError)):
        reporter.identified({})


def test_descriptors_with_an_order_are_not_kept(reporter, ends, settings):
    with HostFiller().create(4096) as chunk:
        ends[0].link.send(codec.encode(m.Order(settings=settings)), [chunk.fd])
    assert reporter.order().settings == settings


def test_progress_is_told_now_and_then_and_at_every_turn(reporter, heard, now):
    reporter.progress("opening")
    for done in range(0, 101, 10):
        now[0] += EVERY_S * 0.35
        reporter.progress("loading", done, 100)
    reporter.progress("warming")
    reports = [(report.phase, report.done) for report in heard()]
    assert reports == [
        ("opening", 0),
        ("loading", 0),
        ("loading", 30),
        ("loading", 60),
        ("loading", 90),
        ("loading", 100),
        ("warming", 0),
    ]


def test_a_tally_adds_up_and_never_tells_more_than_all(reporter, heard, now):
    tally = Tally(reporter, "loading", 100)
    for nbytes in (0, 30, 60, 60):
        now[0] += EVERY_S
        tally(nbytes)
    assert [(report.done, report.total) for report in heard()] == [
        (0, 100),
        (30, 100),
        (90, 100),
        (100, 100),
    ]


def test_a_chunk_goes_with_its_descriptor_and_stays_the_fillers(reporter, ends, heard):
    with HostFiller().create(8192) as chunk:
        reporter.chunk(3, chunk)
        inode = os.fstat(chunk.fd.fileno()).st_ino
    assert heard() == [m.ChunkFilled(index=3, nbytes=8192)]
    (fd,) = ends[0].fds
    assert os.fstat(fd.fileno()).st_ino == inode


def test_a_manifest_goes_sealed(reporter, ends, heard):
    reporter.manifest(b"all there is to know")
    assert heard() == [m.ManifestWritten(nbytes=20)]
    assert read_sealed(ends[0].fds[0].fileno(), 100) == b"all there is to know"


def test_a_failure_goes_with_its_code_and_words(reporter, heard):
    reporter.failed(CheckpointError("model.safetensors is empty"))
    assert heard() == [m.Failed(code="checkpoint", detail="model.safetensors is empty")]


def test_every_report_to_a_rank_that_is_gone_says_so(reporter, ends):
    ends[0].link.close()
    for report in (
        lambda: reporter.progress("loading"),
        lambda: reporter.manifest(b"x"),
        lambda: reporter.failed(CheckpointError("x")),
    ):
        with pytest.raises(BrokenPipeError):
            report()
