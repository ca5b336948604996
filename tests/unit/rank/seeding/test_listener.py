"""A source, with strangers of every kind at its port."""

import json
import logging
import socket
import sys
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from preloadd.errors import ConfigError
from preloadd.rank.seeding import listener as of
from preloadd.rank.seeding.client import fetch
from preloadd.rank.seeding.crowd import MOST_EACH
from preloadd.transport import tcp
from preloadd.transport.threads import MOST
from preloadd.warmup.seeding import messages as m
from preloadd.warmup.seeding.frames import MAX_REQUEST, framed
from preloadd.warmup.seeding.kinds import Outcome
from tests.unit.rank.seeding.source import HASH, HERE, NAME, SECRET, a_token

pytestmark = pytest.mark.anyio

FIELDS = {"config_hash": HASH, "dp_rank": 0, "rank": 3}
KIND = "flashinfer_autotune"
AT_ONCE_S = 5.0
"""Much less than others may take to ask, REQUEST_S, and enough for a machine with much to do."""
CROWD = str(Path(__file__).with_name("crowd_stand_in.py"))


def asking(token=SECRET, **changes):
    return framed(m.request(KIND, FIELDS | changes, token))


def asking_raw(**changes):
    body = {"kind": KIND, **FIELDS, "token": SECRET, **changes}
    return framed(json.dumps(body).encode())


async def heard(wire):
    """All that comes until the end; the answer in it, None if there is none."""
    got = b""
    with anyio.fail_after(5), suppress(ConnectionError):
        while data := await wire.receive():
            got += data
    return json.loads(got[8:]) if got else None


@asynccontextmanager
async def connected(source):
    wire = await tcp.connect(source.where.host, source.where.port)
    try:
        yield wire
    finally:
        wire.close()


async def answer(source, sent):
    async with connected(source) as wire:
        with suppress(ConnectionError):
            await wire.send(sent)
        return await heard(wire)


async def a_good_peer_is_served(source, wanted, table):
    with anyio.fail_after(AT_ONCE_S):
        seeded = await fetch(source.where, wanted, SECRET, within=5.0)
    assert seeded.outcome is Outcome.FETCHED, seeded.why
    assert seeded.value.entries == table.entries


async def test_a_good_peer_gets_what_is_stored(serving, wanted, table, root):
    async with serving() as source:
        await a_good_peer_is_served(source, wanted, table)
        told = await answer(source, asking())
        stored = json.loads((root / HASH / str(NAME)).read_bytes())
        assert told == {"status": "ok", "payload": {str(NAME): stored}}
        assert await answer(source, asking(rank=2)) == {"status": "miss"}


@pytest.mark.parametrize("token", ["", "wrong", "plt_ä", "\udcff", SECRET[:-1], SECRET + "\0"])
async def test_a_wrong_token_is_refused_whatever_is_in_it(serving, wanted, table, token):
    async with serving() as source:
        told = await answer(source, asking(token))
        assert told == {"status": "error", "message": "Unauthorized request"}
        await a_good_peer_is_served(source, wanted, table)


async def test_tokens_that_are_not_ascii_are_as_good_as_others(serving):
    async with serving() as source:
        source.tokens = [a_token("pässwort"), a_token("\udcff")]
        for token in ("pässwort", "\udcff"):
            assert (await answer(source, asking(token)))["status"] == "ok"
        assert (await answer(source, asking("passwort")))["status"] == "error"


async def test_several_tokens_are_good_while_one_replaces_another(serving):
    async with serving() as source:
        source.tokens.append(a_token("next"))
        assert (await answer(source, asking(SECRET)))["status"] == "ok"
        assert (await answer(source, asking("next")))["status"] == "ok"
        del source.tokens[0]
        assert (await answer(source, asking(SECRET)))["status"] == "error"


ATTACKS = {
    "nested lists": framed(b"[" * 60_000),
    "nested lists after a token": framed(b'{"token": "x", "a": ' + b"[" * 60_000),
    "nested lists that are few enough": framed(b"[" * 1000),
    "an endless list": framed(b'{"token": [' + b"1," * 32_000),
    "nested objects": framed(b'{"a":' * 12_000),
    "a length of all ones": b"\xff" * 8,
    "a length of 64 MiB": (1 << 26).to_bytes(8, "big") + b"x" * 100_000,
    "no length": bytes(8),
    "one byte too many": framed(b" " * (MAX_REQUEST + 1)),
    "a longest request of nothing": framed(b" " * MAX_REQUEST),
    "no UTF-8": framed(b"\xff\xfe\xfd"),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"x" * 200,
    "two requests": asking() * 2,
    "an endless number": framed(b'{"token": ' + b"9" * 60_000 + b"}"),
    "no object": framed(b"[1]"),
    "no token": framed(b'{"kind": "flashinfer_autotune"}'),
    "a token that is a list": asking_raw(token=[SECRET]),
    "a token that is a number": asking_raw(token=5),
    "a kind that is a list": asking_raw(kind=[KIND]),
    "a kind that nobody knows": asking_raw(kind="weights"),
    "a hash that leads out": asking_raw(config_hash="../" * 20 + "etc"),
    "a hash that is a number": asking_raw(config_hash=7),
    "a rank that leads out": asking_raw(rank="0/../../x"),
    "a rank that is true": asking_raw(rank=True),
    "a rank that is none": asking_raw(rank=None),
    "a rank below zero": asking_raw(dp_rank=-1),
    "a rank that is huge": asking_raw(dp_rank=10**18),
    "a rank that is a fraction": asking_raw(rank=1.5),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_whatever_is_sent_a_good_peer_is_served(serving, wanted, table, attack, caplog):
    caplog.set_level(logging.DEBUG)
    async with serving() as source:
        for _ in range(3):
            told = await answer(source, ATTACKS[attack])
            assert told is None or told["status"] == "error"
            assert SECRET not in str(told)
        await a_good_peer_is_served(source, wanted, table)
    assert not [record for record in caplog.records if record.exc_info]
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "attack", ["a kind that nobody knows", "a rank that leads out", "a hash that leads out"]
)
async def test_who_has_a_token_is_told_what_is_wrong(serving, attack):
    async with serving() as source:
        told = await answer(source, ATTACKS[attack])
        assert told["message"] in (m.UNSUPPORTED, "rank is no integer", m.INVALID_HASH)


async def test_bytes_that_trickle_in_have_one_deadline(serving, wanted, table, monkeypatch):
    monkeypatch.setattr(of, "REQUEST_S", 0.15)
    async with serving() as source, connected(source) as wire:
        sent, taken = asking(), 0
        with suppress(ConnectionError):
            while taken < 100:
                await wire.send(sent[taken : taken + 1])
                taken += 1
                await anyio.sleep(0.01)
                if taken == 5:
                    await a_good_peer_is_served(source, wanted, table)
        assert await heard(wire) is None
        assert taken < 100


async def test_a_peer_that_does_not_read_has_one_deadline(serving, monkeypatch):
    class Huge:
        name = "huge"

        def resolve(self, fields):
            return b'"' + b"x" * (8 << 20) + b'"'

    monkeypatch.setattr(of, "EXCHANGE_S", 0.15)
    async with serving(Huge()) as source, connected(source) as wire:
        await wire.send(framed(m.request("huge", {}, SECRET)))
        await anyio.sleep(0.3)
        got = 0
        with suppress(ConnectionError):
            while data := await wire.receive():
                got += len(data)
        assert got < 8 << 20


@pytest.mark.slow
@pytest.mark.parametrize("host", [HERE, "127.0.0.9"])
@pytest.mark.parametrize("sent", [b"", asking()[:40], asking("wrong")], ids=["none", "some", "all"])
async def test_a_thousand_connections_stop_nobody(serving, wanted, table, host, sent):
    async with serving() as source:
        argv = [sys.executable, "-S", CROWD, str(source.where.port), host, sent.hex()]
        async with await anyio.open_process(argv, stderr=None) as crowd:
            here = False
            while not here:
                await a_good_peer_is_served(source, wanted, table)
                assert len(source._crowd) <= MOST_EACH + 1
                assert len(source._scopes) < 500  # those told to leave are about to
                with anyio.move_on_after(0.02):
                    here = await crowd.stdout.receive() == b"here\n"
            await a_good_peer_is_served(source, wanted, table)
            await crowd.stdin.aclose()


async def test_wrong_tokens_of_one_address_are_tried_one_after_another(serving, monkeypatch):
    monkeypatch.setattr(of, "PAUSE_S", 0.05)
    async with serving() as source:
        begun = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(answer, source, asking("wrong"))
        assert time.monotonic() - begun >= 0.25


@asynccontextmanager
async def many_more(source, sent=b""):
    async with AsyncExitStack() as undo:
        for _ in range(2 * MOST_EACH):
            wire = await undo.enter_async_context(connected(source))
            await wire.send(sent)
        await anyio.sleep(0.01)
        yield


async def test_who_has_asked_is_not_pushed_out_by_who_says_nothing(serving, monkeypatch):
    monkeypatch.setattr(of, "PAUSE_S", 0.1)
    async with serving() as source, connected(source) as wire:
        await wire.send(asking("wrong"))
        async with many_more(source):
            assert (await heard(wire))["message"] == m.UNAUTHORIZED


async def test_who_is_being_answered_is_not_pushed_out(serving, monkeypatch):
    monkeypatch.setattr(of, "PAUSE_S", 5.0)
    slow = Slow()
    async with serving(slow) as source, connected(source) as wire:
        await wire.send(framed(m.request("slow", {}, SECRET)))
        while not slow.now:  # noqa: ASYNC110
            await anyio.sleep(0.005)
        async with many_more(source, asking("wrong")):
            slow.go.set()
            assert (await heard(wire))["status"] == "ok"


async def test_strangers_are_logged_once_and_without_a_word_of_theirs(serving, caplog):
    async with serving() as source:
        for _ in range(4):
            await answer(source, asking("wrong-token-of-somebody"))
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "127.0.0.1" in record.getMessage()
    assert "wrong-token" not in caplog.text


class Slow:
    name = "slow"

    def __init__(self):
        self.go = threading.Event()
        self.most = self.now = 0

    def resolve(self, fields):
        self.now += 1
        self.most = max(self.most, self.now)
        self.go.wait(5)
        self.now -= 1
        return b"1"


async def test_peers_are_answered_at_the_same_time(serving, kind, wanted, table):
    slow = Slow()
    async with serving(slow, kind) as source, connected(source) as wire:
        await wire.send(framed(m.request("slow", {}, SECRET)))
        await a_good_peer_is_served(source, wanted, table)
        slow.go.set()
        assert await heard(wire) == {"status": "ok", "payload": 1}


async def test_what_is_not_found_in_time_is_said_so(serving, monkeypatch):
    monkeypatch.setattr(of, "RESOLVE_S", 0.05)
    slow = Slow()
    async with serving(slow) as source:
        told = await answer(source, framed(m.request("slow", {}, SECRET)))
        slow.go.set()
    assert told == {"status": "error", "message": "it was not found in time"}


async def test_what_hangs_is_asked_no_more_and_other_kinds_are(
    serving, kind, wanted, table, monkeypatch, caplog
):
    monkeypatch.setattr(of, "RESOLVE_S", 0.05)
    slow = Slow()
    async with serving(slow, kind) as source:
        for _ in range(MOST):
            await answer(source, framed(m.request("slow", {}, SECRET)))
        told = await answer(source, framed(m.request("slow", {}, SECRET)))
        monkeypatch.setattr(of, "RESOLVE_S", 20.0)
        await a_good_peer_is_served(source, wanted, table)
        assert slow.now == slow.most == MOST
        slow.go.set()
    assert told == {"status": "error", "message": "it could not be read"}
    assert f"what has slow still does not answer {MOST} earlier calls" in caplog.text


async def test_one_address_has_few_answers_made_at_once(serving, monkeypatch):
    monkeypatch.setattr(of, "_WAITING_EACH", 3)
    slow, told = Slow(), []
    async with serving(slow) as source:

        async def ask():
            told.append(await answer(source, framed(m.request("slow", {}, SECRET))))

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(ask)
            with anyio.fail_after(2):
                while len(told) < 3:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            slow.go.set()
    assert slow.most <= of._ANSWERS_EACH
    messages = [one.get("message", one["status"]) for one in told]
    assert sorted(messages) == ["ok"] * 7 + ["there are too many requests of this peer"] * 3


@pytest.mark.parametrize(
    "error", [OSError(5, "I/O error"), ConfigError("why"), ZeroDivisionError()]
)
async def test_a_kind_that_fails_ends_one_answer(serving, kind, wanted, table, error, caplog):
    class Failing:
        name = "failing"

        def resolve(self, fields):
            raise error

    async with serving(Failing(), kind) as source:
        told = await answer(source, framed(m.request("failing", {}, SECRET)))
        assert told in (None, {"status": "error", "message": "it could not be read"})
        await a_good_peer_is_served(source, wanted, table)
    assert caplog.records
    assert SECRET not in caplog.text


async def test_tokens_that_cannot_be_read_end_one_connection(serving, wanted, table, caplog):
    async with serving() as source:
        good, source.tokens = source.tokens, None
        assert await answer(source, asking()) is None
        assert await answer(source, asking()) is None
        assert len(caplog.records) == 1
        source.tokens = good
        await a_good_peer_is_served(source, wanted, table)


async def test_a_port_that_is_taken_is_said_so_and_tried_again(
    serving, port, wanted, table, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(tcp, "_AGAIN_S", 0.02)
    with socket.create_server((HERE, port)) as other:
        async with serving() as source:
            assert f"{HERE}:{port}" in source.port.fault
            assert "ss -ltnp" in source.port.fault
            assert "others are seeded" not in caplog.text
            other.close()
            await a_good_peer_is_served(source, wanted, table)
            assert source.port.fault == ""
            assert f"others are seeded at {HERE}:{port}" in caplog.text


async def test_without_descriptors_it_waits_for_some(
    serving, wanted, table, descriptors_left, caplog
):
    async with serving() as source:
        with socket.socket() as sock:
            with descriptors_left(0):
                sock.connect((source.where.host, source.where.port))
                await anyio.sleep(0.25)
            (record,) = caplog.records
            assert "accepting a peer: this process may have" in record.getMessage()
        await a_good_peer_is_served(source, wanted, table)
