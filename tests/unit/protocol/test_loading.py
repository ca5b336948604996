from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.manifest import MAX_CHUNKS
from preloadd.errors import ProtocolViolation
from preloadd.protocol import codec, payload
from preloadd.protocol.loading import Load, LoadPhase, LoadReceiver
from preloadd.protocol.messages import (
    ChunkFilled,
    Failed,
    Identified,
    ManifestWritten,
    Progress,
    Tuned,
    Warmable,
)

MANIFEST = ManifestWritten(nbytes=900)
PROGRESS = Progress(phase="weights", done=1, total=2)
FAILED = Failed(code="checkpoint", detail="a.safetensors is empty")
WARMABLE = Warmable(tunes=True)
TUNED = Tuned(entries=80)


def after(*reports: tuple, waits: bool = False) -> LoadReceiver[str]:
    receiver = LoadReceiver[str](waits=waits)
    for report, *handles in reports:
        assert receiver.receive(codec.encode(report), handles) == report
    return receiver


def chunk(index: int, nbytes: int = 512) -> tuple:
    return ChunkFilled(index=index, nbytes=nbytes), f"chunk {index}"


def test_a_load_is_complete_with_its_manifest():
    receiver = after((PROGRESS,), chunk(0), (PROGRESS,), chunk(1, 1024))
    assert receiver.phase is LoadPhase.LOADING
    receiver.receive(codec.encode(MANIFEST), ["manifest"])
    assert receiver.phase is LoadPhase.COMPLETE
    assert receiver.take() == Load("manifest", 900, (("chunk 0", 512), ("chunk 1", 1024)))
    assert receiver.release() == ()


def test_a_taken_load_stays_taken():
    receiver = after(chunk(0), (MANIFEST, "manifest"))
    receiver.take()
    receiver.receive_eof()
    assert (receiver.phase, receiver.release()) == (LoadPhase.COMPLETE, ())
    with pytest.raises(ValueError, match="nothing to take"):
        receiver.take()


def test_an_unfinished_load_cannot_be_taken():
    with pytest.raises(ValueError, match="nothing to take: the load is loading"):
        after(chunk(0)).take()


def test_as_many_chunks_as_are_allowed_are_collected():
    receiver = after(*(chunk(index) for index in range(MAX_CHUNKS)), (MANIFEST, "manifest"))
    assert len(receiver.take().chunks) == MAX_CHUNKS


def test_what_is_loaded_is_identified_once_and_before_all_chunks():
    identified = Identified(key={"dtype": "float16"})
    receiver = LoadReceiver[str](waits=True)
    receiver.receive(codec.encode(identified))
    with pytest.raises(ProtocolViolation, match="identified: it comes once, before all chunks"):
        receiver.receive(codec.encode(identified))
    assert receiver.phase is LoadPhase.FAILED
    with pytest.raises(ProtocolViolation, match="identified: nobody waits for it"):
        after((PROGRESS,), (identified,))


def test_where_ranks_meet_first_nothing_is_filled_before_that():
    identified = codec.encode(Identified(key={"dtype": "float16"}))
    receiver = LoadReceiver[str](waits=True)
    receiver.receive(identified)
    with pytest.raises(ProtocolViolation, match="nobody has let the loader proceed"):
        receiver.receive(codec.encode(ChunkFilled(index=0, nbytes=512)), ["chunk"])
    assert receiver.release() == ("chunk",)
    receiver = LoadReceiver[str](waits=True)
    receiver.receive(identified)
    receiver.proceed()
    receiver.receive(codec.encode(ChunkFilled(index=0, nbytes=512)), ["chunk"])
    assert receiver.phase is LoadPhase.LOADING


def test_a_failure_ends_the_load_and_gives_the_handles_back():
    receiver = after(chunk(0), (FAILED,))
    assert (receiver.phase, receiver.failure) == (LoadPhase.FAILED, FAILED)
    assert receiver.release() == ("chunk 0",)
    assert receiver.release() == ()


def test_a_failure_after_the_manifest_still_counts():
    receiver = after(chunk(0), (MANIFEST, "manifest"), (PROGRESS,), (FAILED,))
    with pytest.raises(ValueError, match="failed"):
        receiver.take()
    assert set(receiver.release()) == {"chunk 0", "manifest"}


def test_what_a_loader_makes_ready_besides_is_heard_after_the_manifest():
    receiver = after(chunk(0), (MANIFEST, "manifest"), (WARMABLE,))
    assert (receiver.warmable, receiver.tunes, receiver.tuned) == (WARMABLE, False, None)
    receiver.tune(wanted=True)
    for report in (PROGRESS, TUNED):
        receiver.receive(codec.encode(report))
    assert (receiver.tunes, receiver.tuned) == (True, TUNED)
    assert receiver.phase is LoadPhase.COMPLETE
    assert receiver.take().manifest == "manifest"


def test_only_a_loader_that_was_told_to_has_tuned():
    receiver = after(chunk(0), (MANIFEST, "manifest"), (WARMABLE,))
    receiver.tune(wanted=False)
    with pytest.raises(
        ProtocolViolation, match="tuned: it comes once, from a loader that was told"
    ):
        receiver.receive(codec.encode(TUNED))
    assert set(receiver.release()) == {"chunk 0", "manifest"}


def test_it_says_so_once():
    receiver = after(chunk(0), (MANIFEST, "manifest"), (WARMABLE,))
    receiver.tune(wanted=True)
    receiver.receive(codec.encode(TUNED))
    with pytest.raises(ProtocolViolation, match="tuned: it comes once"):
        receiver.receive(codec.encode(TUNED))


def test_a_loader_that_ends_early_has_failed():
    receiver = after(chunk(0))
    receiver.receive_eof()
    assert (receiver.phase, receiver.failure) == (LoadPhase.FAILED, None)
    assert receiver.release() == ("chunk 0",)


def test_a_loader_may_end_after_the_manifest():
    receiver = after(chunk(0), (MANIFEST, "manifest"))
    receiver.receive_eof()
    assert receiver.phase is LoadPhase.COMPLETE
    assert receiver.take().manifest == "manifest"


def test_a_complete_load_that_is_given_up_has_failed():
    receiver = after(chunk(0), (MANIFEST, "manifest"))
    assert set(receiver.release()) == {"chunk 0", "manifest"}
    assert receiver.phase is LoadPhase.FAILED


BAD = {
    "chunk without handle": (
        [chunk(0)],
        ChunkFilled(index=1, nbytes=1),
        0,
        "descriptors: 0 instead of 1",
    ),
    "chunk with two": (
        [chunk(0)],
        ChunkFilled(index=1, nbytes=1),
        2,
        "descriptors: 2 instead of 1",
    ),
    "chunk again": ([chunk(0)], ChunkFilled(index=0, nbytes=1), 1, "index 0 after 1 chunks"),
    "chunk skipped": ([chunk(0)], ChunkFilled(index=2, nbytes=1), 1, "index 2 after 1 chunks"),
    "negative chunk": ([], ChunkFilled(index=-1, nbytes=1), 1, "index -1"),
    "empty chunk": ([], ChunkFilled(index=0, nbytes=0), 1, "the loader's chunk: 0 bytes"),
    "chunk 129": (
        [chunk(index) for index in range(MAX_CHUNKS)],
        ChunkFilled(index=MAX_CHUNKS, nbytes=1),
        1,
        "at most 128",
    ),
    "chunk after manifest": (
        [chunk(0), (MANIFEST, "manifest")],
        ChunkFilled(index=1, nbytes=1),
        1,
        "the manifest came before it",
    ),
    "manifest of nothing": ([], MANIFEST, 1, "a manifest after 0 chunks"),
    "manifest again": ([chunk(0), (MANIFEST, "manifest")], MANIFEST, 1, "phase complete"),
    "manifest without handle": ([chunk(0)], MANIFEST, 0, "descriptors: 0 instead of 1"),
    "empty manifest": ([chunk(0)], ManifestWritten(nbytes=0), 1, "the loader's manifest: 0 bytes"),
    "huge manifest": (
        [chunk(0)],
        ManifestWritten(nbytes=payload.MAX_NBYTES + 1),
        1,
        "268435457 bytes; at most 268,435,456",
    ),
    "progress with handle": ([chunk(0)], PROGRESS, 1, "descriptors: 1 instead of 0"),
    "negative progress": ([], Progress(phase="", done=-1), 0, "negative bytes"),
    "failure with handle": ([chunk(0)], FAILED, 1, "descriptors: 1 instead of 0"),
    "after a failure": ([chunk(0), (FAILED,)], PROGRESS, 0, "failed already"),
    "tables before the manifest": ([chunk(0)], WARMABLE, 0, "it comes once, after the manifest"),
    "tables twice": (
        [chunk(0), (MANIFEST, "manifest"), (WARMABLE,)],
        WARMABLE,
        0,
        "it comes once, after the manifest",
    ),
    "tuned unasked": (
        [chunk(0), (MANIFEST, "manifest"), (WARMABLE,)],
        TUNED,
        0,
        "from a loader that was told to tune",
    ),
}


@pytest.mark.parametrize(("before", "report", "count", "text"), BAD.values(), ids=BAD)
def test_a_report_that_does_not_add_up_fails_the_load(before, report, count, text):
    receiver = after(*before)
    kept = [handle for _, *handles in before for handle in handles]
    spoiled = ["spoiled 0", "spoiled 1"][:count]
    with pytest.raises(ProtocolViolation, match=text):
        receiver.receive(codec.encode(report), spoiled)
    assert receiver.phase is LoadPhase.FAILED
    assert sorted(receiver.release()) == sorted(kept + spoiled)


def test_a_report_is_accepted_whole_and_with_its_handles_or_not_at_all(report):
    packet = codec.encode(report)
    before = [chunk(0)] if isinstance(report, ManifestWritten) else []
    if isinstance(report, (Warmable, Tuned)):
        before = [chunk(0), (MANIFEST, "manifest")]
    right = 1 if isinstance(report, (ChunkFilled, ManifestWritten)) else 0
    for length in range(len(packet) + 1):
        for count in range(4):
            receiver = after(*before, waits=isinstance(report, Identified))
            receiver.tune(wanted=True)
            handles = [f"handle {index}" for index in range(count)]
            if (length, count) == (len(packet), right):
                receiver.receive(packet, handles)
            else:
                with pytest.raises(ProtocolViolation):
                    receiver.receive(packet[:length], handles)
                assert receiver.phase is LoadPhase.FAILED
            assert len(receiver.release()) == len(before) + count


@given(st.data())
def test_no_handle_is_lost_whatever_the_loader_does(data):
    """Every handle given comes out once, be it taken or released, in time or late."""
    receiver = LoadReceiver[int]()
    given, got, index = 0, [], 0
    for _ in range(data.draw(st.integers(0, 12))):
        report = data.draw(
            st.sampled_from([ChunkFilled(index=index, nbytes=1), MANIFEST, PROGRESS, FAILED])
        )
        right = 1 if isinstance(report, (ChunkFilled, ManifestWritten)) else 0
        count = data.draw(st.sampled_from([right, right, right, 0, 1, 2]))
        packet = codec.encode(report)
        length = data.draw(st.sampled_from([len(packet)] * 9 + [3]))
        handles = list(range(given, given + count))
        given += count
        try:
            receiver.receive(packet[:length], handles)
            index += isinstance(report, ChunkFilled)
        except ProtocolViolation:
            assert receiver.phase is LoadPhase.FAILED
        action = data.draw(st.sampled_from(["", "", "", "take", "release", "eof"]))
        if action == "take" and receiver.phase is LoadPhase.COMPLETE:
            with suppress(ValueError):
                load = receiver.take()
                got += [load.manifest, *(handle for handle, _ in load.chunks)]
        elif action == "release":
            got += receiver.release()
        elif action == "eof":
            receiver.receive_eof()
    got += receiver.release()
    assert sorted(got) == list(range(given))
