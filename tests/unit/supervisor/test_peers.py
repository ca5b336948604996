"""Real servers on loopback, good and bad ones, are asked as peers."""

import json
import logging
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import pytest

from preloadd.domain.endpoint import Endpoint
from preloadd.supervisor.introduction import LIMIT
from preloadd.supervisor.nodes import Peer
from preloadd.supervisor.peers import LONGEST_PAUSE_S, Peers, pause_after
from tests.http_stand_in import response, serving
from tests.ports import free_port
from tests.threads import threads_left
from tests.unit.supervisor.given import HOSTILE

pytestmark = pytest.mark.anyio

IDENTITY = "f" * 32


def told(**changes) -> bytes:
    node = {
        "identity": "1" * 32,
        "host": "node-8",
        "version": "0.1.0",
        "healthy": True,
        "reasons": [],
        "groups": [{"name": "g", "ranks": [{"instance": "CPU-0", "condition": "serving"}]}],
    }
    return response(json.dumps({**node, **changes}).encode())


@asynccontextmanager
async def watched(*endpoints: Endpoint, patience: float = 5.0) -> AsyncIterator[Peers]:
    peers = Peers(endpoints, identity=IDENTITY, timeout=patience, pause=0.02)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peers.watch)
        yield peers
        tasks.cancel_scope.cancel()


async def until(peers: Peers, seen) -> tuple[Peer, ...]:
    with anyio.fail_after(5):
        # Peers tell nobody of changes.
        while not seen(found := peers.seen()):  # noqa: ASYNC110
            await anyio.sleep(0.005)
    return found


def asked(found: tuple[Peer, ...]) -> bool:
    return all(peer.problem != "not asked yet" for peer in found)


async def test_what_a_peer_tells_is_known_with_its_age(caplog):
    caplog.set_level(logging.INFO)
    with serving(told()) as endpoint:
        async with watched(endpoint) as peers:
            (before,) = peers.seen()
            assert (before.problem, before.age_s, before.node) == ("not asked yet", None, None)
            (peer,) = await until(peers, asked)
            assert (peer.address, peer.reachable) == (str(endpoint), True)
            assert peer.node is not None
            assert (peer.node.host, peer.node.healthy, peer.groups[0].serving) == (
                "node-8",
                True,
                1,
            )
            assert peer.age_s is not None
            assert 0 <= peer.age_s < 5
            await anyio.sleep(0.1)
    assert caplog.text.count(f"peer {endpoint}: answers, as node-8") == 1


async def test_one_that_falls_silent_keeps_what_it_told_and_grows_old(caplog):
    calls = [told()]

    def once(client, _):
        client.sendall(calls.pop() if calls else b"")

    with serving(once) as endpoint:
        async with watched(endpoint) as peers:
            await until(peers, lambda found: found[0].reachable)
            (peer,) = await until(peers, lambda found: found[0].problem)
            assert peer.problem == "it hung up before the end of its answer"
            assert peer.groups[0].name == "g"
            await anyio.sleep(0.05)
            (later,) = peers.seen()
            assert later.age_s is not None
            assert peer.age_s is not None
            assert later.age_s >= peer.age_s + 0.04
            calls.append(told(healthy=False))
            (peer,) = await until(peers, lambda found: found[0].reachable)
            assert peer.node is not None
            assert not peer.node.healthy
    assert caplog.text.count("hung up before the end") == 1, "what goes on is told once"


@contextmanager
def refusing():
    yield Endpoint("127.0.0.1", free_port())


def _hang(client, over):
    over.wait(10)


@pytest.mark.slow
async def test_each_is_told_by_itself_and_a_bad_one_delays_nobody():
    """Slow, huge, rude, gone: all asked together, and the good one is heard at once."""
    with (
        serving(told()) as good,
        serving(_hang) as slow,
        serving(response(b"x" * LIMIT * 2)) as huge,
        serving(b"\x00garbage\r\n") as rude,
        serving(response(b"", status="301 Moved", more="Location: http://a/\r\n")) as moved,
        serving(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{") as early,
        serving(response(b'{"healthy": true}')) as other,
        refusing() as gone,
    ):
        everybody = (slow, good, huge, rude, moved, early, other, gone)
        async with watched(*everybody, patience=0.5) as peers:
            began = anyio.current_time()
            await until(peers, lambda found: found[1].reachable)
            assert anyio.current_time() - began < 0.45
            found = {peer.address: peer for peer in await until(peers, asked)}
    assert [address for address, peer in found.items() if peer.reachable] == [str(good)]
    for endpoint, said in (
        (slow, "no answer within 0.5 s"),
        (huge, "longer than 512.0 KiB"),
        (rude, "no HTTP"),
        (moved, "redirects (301)"),
        (early, "hung up"),
        (other, "not how a node is: identity: "),
        (gone, "connection refused"),
    ):
        assert said in found[str(endpoint)].problem


async def test_names_that_peers_chose_can_be_shown():
    with serving(told(host=HOSTILE, reasons=[HOSTILE])) as endpoint:
        async with watched(endpoint) as peers:
            (peer,) = await until(peers, asked)
    assert peer.node is not None
    assert peer.node.host.isprintable()
    assert peer.node.reasons[0].isprintable()


async def test_who_finds_itself_in_the_list_leaves_itself_out(caplog):
    caplog.set_level(logging.INFO)
    with serving(told(identity=IDENTITY)) as here, serving(told()) as there:
        async with watched(here, there) as peers:
            found = await until(peers, lambda found: len(found) == 1)
    assert found[0].address == str(there)
    assert f"peer {here}: is this supervisor itself" in caplog.text


async def test_a_name_server_that_hangs_is_told_and_asked_once(monkeypatch):
    over, asked_for = threading.Event(), []

    def hang(host, *_, **__):
        asked_for.append(host)
        over.wait(10)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    async with watched(Endpoint("node-9", 1), patience=0.05) as peers:
        (peer,) = await until(peers, asked)
        assert peer.problem == "its name is not resolved in time"
        await anyio.sleep(0.1)
        assert asked_for == ["node-9"]
        over.set()
        await until(peers, lambda found: "Temporary failure" in found[0].problem)


async def test_what_nobody_thought_of_ends_nothing(monkeypatch, caplog):
    def surprise(*_, **__):
        raise ValueError("who would have thought")

    monkeypatch.setattr(socket, "getaddrinfo", surprise)
    async with watched(Endpoint("node-9", 1)) as peers:
        (peer,) = await until(peers, asked)
    assert peer.problem == "this supervisor failed to ask it: its log says why"
    assert "who would have thought" in caplog.text


async def test_without_a_thread_nobody_is_asked_for_now():
    with serving(told()) as endpoint:
        async with watched(endpoint) as peers:
            with threads_left(0):
                await until(peers, lambda found: "ulimit" in found[0].problem)
            (peer,) = await until(peers, lambda found: found[0].reachable)
            assert peer.problem == ""


async def test_ipv6():
    with serving(told(), "::1") as endpoint:
        async with watched(endpoint) as peers:
            (peer,) = await until(peers, asked)
    assert peer.reachable
    assert peer.address == f"[::1]:{endpoint.port}"


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_pauses_grow_to_a_limit_and_spread(chance):
    pauses = [pause_after(failures, pause=2.0, chance=chance) for failures in range(40)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 2.0 * (0.75 + chance / 2)
    assert pauses[-1] == LONGEST_PAUSE_S * (0.75 + chance / 2)
    assert pause_after(0, pause=60.0, chance=0.5) == pause_after(9, pause=60.0, chance=0.5) == 60.0
