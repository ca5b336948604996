"""Weights from peer to peer: real sockets, a real sender, and what may go wrong between them."""

import os
import signal
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.loader.race import Rule
from preloadd.protocol import messages as m
from preloadd.warmup.seeding import messages as seeding
from preloadd.warmup.seeding.frames import framed
from preloadd.warmup.seeding.weights import STREAM, TICKET_S, digest_of, stream_fields
from tests.waiting import eventually
from tests.weights_peers import (
    HERE,
    TOKEN,
    Proxy,
    Target,
    asking,
    checkpoint,
    content,
    fill,
    loaded,
    serving,
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return RankSettings(
        group="tests",
        instance="CPU-0",
        socket_dir=str(folder),
        derived=False,
        model=ModelSettings(
            path=str(checkpoint(folder / "model")), name="tests/model", chunk_bytes=9 << 20
        ),
    )


@pytest.fixture(scope="module")
def generation(settings, tmp_path_factory):
    made = loaded(settings, tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


@pytest.fixture
def source(settings, generation, port):
    with serving(settings, generation, port) as source:
        yield source


@pytest.fixture
def target(settings, generation):
    with closing(Target(settings, generation)) as target:
        yield target


@pytest.fixture
def through(source):
    """A proxy before the source, which harms what it sends."""
    made = []

    def through(harm):
        made.append(Proxy(source.where.port, harm))
        return made[-1]

    yield through
    for proxy in made:
        proxy.close()


def unharmed(number, came, data):
    return data


def is_whole(target, generation, filled):
    chunks = [report for report in target.reports if isinstance(report, m.ChunkFilled)]
    assert [chunk.nbytes for chunk in chunks] == list(generation.manifest.chunks)
    assert target.content() == content(list(generation.chunks))
    assert (filled.bytes_peer, filled.bytes_read) == (sum(generation.manifest.chunks), 0)


def nothing_is_left(target):
    """No chunk was handed over, and none is still mapped or open."""
    assert not target.fds
    assert "preloadd-chunk" not in Path("/proc/self/maps").read_text()


def test_an_arena_comes_from_a_peer_to_the_byte(source, target, generation):
    with asking(source.where) as peer:
        filled = fill(peer, target)
    is_whole(target, generation, filled)
    assert next(r.phase for r in target.reports if isinstance(r, m.Progress)) == "seeding"


@pytest.mark.slow
def test_a_sender_serves_several_and_ends_when_nobody_wants_any_more(source, settings, generation):
    senders = set()
    for _ in range(2):
        with closing(Target(settings, generation)) as target, asking(source.where) as peer:
            is_whole(target, generation, fill(peer, target))
        senders.add(source.sender)
    (first,) = senders
    eventually(lambda: not Path(f"/proc/{first}").exists(), lambda: "the sender's end")


def test_of_other_weights_nothing_is_taken(source, target, caplog):
    target.key["tp_rank"] = "7"
    with asking(source.where) as peer:
        assert fill(peer, target) is None
    nothing_is_left(target)
    assert "it has none" in caplog.text


def test_an_arena_that_is_laid_out_otherwise_is_refused(source, settings, generation, caplog):
    import dataclasses

    other = dataclasses.replace(settings.model, chunk_bytes=5 << 20)
    target = Target(dataclasses.replace(settings, model=other), generation)
    with closing(target), asking(source.where) as peer:
        assert fill(peer, target) is None
        nothing_is_left(target)
    assert "laid out otherwise" in caplog.text


def test_a_wrong_token_gets_nothing(source, target, caplog):
    with asking(source.where, token="another-one-altogether") as peer:
        assert fill(peer, target) is None
    nothing_is_left(target)
    assert "does not accept this rank's token" in caplog.text
    assert "another-one" not in caplog.text


def test_nobody_there_costs_little(port, target, caplog):
    from preloadd.domain.endpoint import Endpoint

    begun = time.monotonic()
    rule = Rule(enough_s=0.0, least_s=0.5)
    with asking(Endpoint(HERE, port), rule) as peer:
        assert fill(peer, target) is None
    assert time.monotonic() - begun < 3
    assert "connection refused" in caplog.text


def test_a_fast_disk_is_not_left_for_a_peer(source, target):
    with asking(source.where, Rule()) as peer:
        assert fill(peer, target) is None
    assert source.giving._sender is None


def test_a_peer_that_is_slower_than_the_disk_is_given_up(through, target, caplog):
    def slowly(number, came, data):
        time.sleep(0.005)
        return data

    with asking(through(slowly).where, Rule(enough_s=0.0, trial_s=0.2)) as peer:
        begun = time.monotonic()
        assert fill(peer, target) is None
    assert time.monotonic() - begun < 3
    nothing_is_left(target)
    assert "it sends 0.0" in caplog.text


def test_streams_that_break_go_on_at_their_byte_over_another(through, target, generation):
    sent = []

    def cut(number, came, data):
        if number in (2, 3) and came > 1 << 20:
            return None
        sent.append(len(data))
        return data

    with asking(through(cut).where) as peer:
        is_whole(target, generation, fill(peer, target))
    # What had come over them was not sent again.
    assert sum(sent) < sum(generation.manifest.chunks) + (3 << 20)


def test_a_sender_that_is_killed_is_started_again(source, through, target, generation):
    killed = threading.Event()

    def kill(number, came, data):
        if came > 1 << 20 and not killed.is_set():
            killed.set()
            os.kill(source.sender, signal.SIGKILL)
        return data

    with asking(through(kill).where) as peer:
        is_whole(target, generation, fill(peer, target))
    assert killed.is_set()


def test_a_source_that_is_gone_leaves_it_to_the_disk(source, through, target, caplog):
    def end(number, came, data):
        if came > 1 << 20:
            source.portal.start_task_soon(source.giving.withdraw)
        return data

    with asking(through(end).where) as peer:
        assert fill(peer, target) is None
    nothing_is_left(target)
    assert "no weights from a peer, they are read from the disk" in caplog.text


def flipped(data):
    return bytes([data[0] ^ 1]) + data[1:]


def test_a_damaged_piece_is_asked_for_again(through, target, generation, caplog):
    def damage(number, came, data):
        return flipped(data) if number == 2 and (1 << 20) < came < (1 << 20) + (1 << 16) else data

    with asking(through(damage).where) as peer:
        is_whole(target, generation, fill(peer, target))
    assert "came damaged" in caplog.text


def test_where_all_is_damaged_it_is_left_to_the_disk(through, target, caplog):
    def damage(number, came, data):
        return flipped(data) if came > 1 << 20 else data

    with asking(through(damage).where) as peer:
        assert fill(peer, target) is None
    nothing_is_left(target)
    assert "pieces came damaged" in caplog.text


def test_a_stream_that_stalls_is_given_up(through, target, generation, monkeypatch):
    from preloadd.loader import streams

    monkeypatch.setattr(streams, "SILENT_S", 0.3)
    stalled = threading.Event()

    def stall(number, came, data):
        if number == 2 and came > 1 << 20:
            stalled.wait(5)
        return data

    try:
        with asking(through(stall).where) as peer:
            is_whole(target, generation, fill(peer, target))
    finally:
        stalled.set()


def ask(source, kind, fields):
    """A connection, and what the source answers to a request on it."""
    sock = socket.create_connection((HERE, source.where.port), timeout=5)
    sock.sendall(framed(seeding.request(kind, fields, TOKEN)))
    size = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "big")
    return sock, seeding.parse_answer(sock.recv(size, socket.MSG_WAITALL))


def a_ticket(source, generation):
    sock, answer = ask(source, "weights", {"key": digest_of(generation.manifest.key)})
    sock.close()
    assert isinstance(answer.payload, dict)
    return answer.payload["ticket"]


def test_a_ticket_is_for_so_many_streams(source, generation):
    ticket = a_ticket(source, generation)
    asked = [ask(source, STREAM, stream_fields(ticket)) for _ in range(100)]
    try:
        assert [answer.status for _, answer in asked] == ["ok"] * 16 + ["error"] * 84
        assert "used up" in asked[-1][1].message
    finally:
        for sock, _ in asked:
            sock.close()


def test_a_ticket_expires(source, generation):
    ticket = a_ticket(source, generation)
    source.late = TICKET_S
    sock, answer = ask(source, STREAM, stream_fields(ticket))
    sock.close()
    assert "expired" in answer.message


@pytest.mark.parametrize("ticket", ["00" * 16, 7, None, ["x"], ""])
def test_a_ticket_has_to_be_one(source, generation, ticket):
    a_ticket(source, generation)
    sock, answer = ask(source, STREAM, {"ticket": ticket})
    sock.close()
    assert answer.status == "error"


@pytest.mark.parametrize(
    "said", [b"\xff" * 12, bytes([0, 0, 0, 0, 0, 0, 0, 9] + [0] * 4), b"\0" * 8 + b"\xff" * 4]
)
def test_who_asks_for_no_place_is_hung_up_on(source, generation, said):
    sock, answer = ask(source, STREAM, stream_fields(a_ticket(source, generation)))
    with sock:
        assert answer.status == "ok"
        sock.sendall(said)
        assert sock.recv(1) == b""


def test_withdrawn_weights_are_sent_no_more(source, generation):
    sock, _ = ask(source, STREAM, stream_fields(a_ticket(source, generation)))
    sender = source.sender
    with sock:
        source.portal.call(source.giving.withdraw)
        assert sock.recv(1) == b""
    eventually(lambda: not Path(f"/proc/{sender}").exists(), lambda: "the sender's end")
    sock, answer = ask(source, "weights", {"key": digest_of(generation.manifest.key)})
    sock.close()
    assert answer.status == "miss"
