"""A target, and sources of every kind."""

import json
import logging
import socket
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from preloadd.domain.endpoint import Endpoint
from preloadd.rank.seeding import client as of
from preloadd.rank.seeding.client import fetch
from preloadd.warmup.seeding import messages as m
from preloadd.warmup.seeding.frames import MAX_ANSWER, framed
from preloadd.warmup.seeding.kinds import Outcome
from preloadd.warmup.table import render
from tests.unit.rank.seeding.source import HERE, NAME, SECRET

pytestmark = pytest.mark.anyio


@pytest.fixture
def sending(port):
    """A context with a source that sends each connection the next of some bytes, and hangs up."""

    @asynccontextmanager
    async def sending(*answers, later=0.0):
        left = list(answers)

        async def serve(stream):
            async with stream:
                with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                    await stream.receive()
                    await stream.send(left.pop(0) if len(left) > 1 else left[0])
                    await stream.send_eof()
                    while True:
                        await stream.receive()

        async with anyio.create_task_group() as tasks:

            async def listen():
                await anyio.sleep(later)
                async with await anyio.create_tcp_listener(
                    local_host=HERE, local_port=port
                ) as listener:
                    await listener.serve(serve, tasks)

            tasks.start_soon(listen)
            await anyio.sleep(0.01)
            yield Endpoint(HERE, port)
            tasks.cancel_scope.cancel()

    return sending


async def test_a_source_that_is_still_starting_is_waited_for(sending, wanted, table, monkeypatch):
    monkeypatch.setattr(of, "_MAX_PAUSE_S", 0.05)
    good = framed(m.found(b'{"%s": %s}' % (str(NAME).encode(), render(table))))
    async with sending(b"", good[:30], good, later=0.1) as source:
        seeded = await fetch(source, wanted, SECRET, within=5)
    assert seeded.outcome is Outcome.FETCHED
    assert seeded.why == ""
    assert seeded.value.entries == table.entries


async def test_nobody_there_is_said_after_a_while(port, wanted):
    begun = anyio.current_time()
    seeded = await fetch(Endpoint(HERE, port), wanted, SECRET, within=0.2)
    assert 0.2 <= anyio.current_time() - begun < 1
    assert seeded.outcome is Outcome.UNREACHABLE
    assert seeded.why == f"{HERE}:{port}: connection refused (tried for 0.2 s)"


async def test_how_long_it_was_tried_is_rounded(port, wanted):
    seeded = await fetch(Endpoint(HERE, port), wanted, SECRET, within=0.09062)
    assert seeded.why.endswith("(tried for 0.1 s)")


async def test_a_source_that_says_nothing_is_given_up(port, wanted):
    with socket.create_server((HERE, port)):
        seeded = await fetch(Endpoint(HERE, port), wanted, SECRET, within=0.1)
    assert seeded.outcome is Outcome.UNREACHABLE
    assert "has not answered" in seeded.why


async def test_one_that_says_nothing_is_asked_again(port, wanted, monkeypatch):
    monkeypatch.setattr(of, "ATTEMPT_S", 0.05)
    with socket.create_server((HERE, port)) as server:
        seeded = await fetch(Endpoint(HERE, port), wanted, SECRET, within=0.4)
        server.settimeout(1)
        for _ in range(2):
            server.accept()[0].close()
    assert "no answer came in time" in seeded.why


async def test_one_that_hangs_up_is_not_asked_all_the_time(port, wanted):
    came = 0

    async def hang_up(stream):
        nonlocal came
        came += 1
        await stream.aclose()

    listener = await anyio.create_tcp_listener(local_host=HERE, local_port=port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, hang_up)
        seeded = await fetch(Endpoint(HERE, port), wanted, SECRET, within=0.25)
        tasks.cancel_scope.cancel()
    assert seeded.outcome is Outcome.UNREACHABLE
    assert 2 <= came <= 3


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70, "a..b"])
async def test_a_name_that_means_nothing_is_said(wanted, host):
    seeded = await fetch(Endpoint(host, 9), wanted, SECRET, within=0.3)
    assert seeded.outcome is Outcome.UNREACHABLE
    assert host in seeded.why


@pytest.mark.parametrize(
    ("answer", "outcome", "why"),
    [
        (m.missed(), Outcome.MISSING, "it has none"),
        (m.failed(m.UNAUTHORIZED), Outcome.REFUSED, "does not accept this rank's token"),
        (m.failed(m.UNSUPPORTED), Outcome.REFUSED, "does not know this kind"),
        (m.failed(m.INVALID_HASH), Outcome.REFUSED, "does not take this hash"),
        (m.failed(SECRET), Outcome.REFUSED, "see its log"),
        (m.found(b"null"), Outcome.INCOMPATIBLE, "not the one table"),
        (m.found(b"[" * 60_000), Outcome.INCOMPATIBLE, "no plain JSON"),
        (b"[" * 60_000, Outcome.INCOMPATIBLE, "no plain JSON"),
        (b"{}", Outcome.INCOMPATIBLE, "no status"),
        (b" " * (MAX_ANSWER + 1), Outcome.INCOMPATIBLE, "are read"),
    ],
)
async def test_other_answers_are_final(sending, wanted, answer, outcome, why):
    async with sending(framed(answer)) as source:
        with anyio.fail_after(2):
            seeded = await fetch(source, wanted, SECRET, within=30)
    assert seeded.outcome is outcome
    assert seeded.value is None
    assert str(source) in seeded.why
    assert why in seeded.why


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 8, b"\0" * 8])
async def test_what_is_no_source_is_said(sending, wanted, garbage):
    async with sending(garbage) as source:
        seeded = await fetch(source, wanted, SECRET, within=30)
    assert seeded.outcome is Outcome.INCOMPATIBLE
    assert "this is no source" in seeded.why
    assert ("something else listens there" in seeded.why) == (garbage[0] != 0)


@pytest.mark.parametrize("token", [SECRET, "x" * 60 + SECRET, "kurz", "schlüssel-mit-ä-und-mehr"])
async def test_a_token_that_is_sent_back_is_not_told(sending, wanted, token, caplog):
    caplog.set_level(logging.DEBUG)
    for sent in ({token: 5}, {"x" * 70 + token: 5}, {"a": ["R", 0], "_metadata": {"gpu": token}}):
        body = json.dumps({str(NAME): sent}).encode()
        async with sending(framed(m.found(body))) as source:
            seeded = await fetch(source, wanted, token, within=30)
        assert seeded.outcome is Outcome.INCOMPATIBLE
        told = f"{seeded!r} {seeded.why} {caplog.text}"
        assert not any(token[n : n + 8] in told for n in range(max(len(token) - 7, 1)))


async def test_why_is_one_line_and_short(sending, wanted, body):
    async with sending(framed(m.found(body))) as source:
        seeded = await fetch(source, wanted, SECRET, within=30)
    assert seeded.outcome is Outcome.INCOMPATIBLE
    assert "\n" not in seeded.why
    assert len(seeded.why) < 600


@pytest.fixture
def body(table):
    saved = dict.fromkeys(table.metadata, "\n\x1b[2J" + "x" * 900)
    return json.dumps({str(NAME): {"_metadata": saved}}).encode()
