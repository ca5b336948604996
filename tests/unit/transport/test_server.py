import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Self

import anyio
import anyio.lowlevel
import pytest

from preloadd.domain.access import Peer
from preloadd.domain.ids import LeaseId
from preloadd.domain.lifecycle import State
from preloadd.errors import AccessDenied, ErrorCode
from preloadd.linux import peers, seqpacket
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.transport.aio import Limits, Link, Session
from preloadd.transport.blocking import connect
from preloadd.transport.server import Server
from tests.listening import listen

pytestmark = pytest.mark.anyio

LEASE = LeaseId("0b" * 8)
SECRET = "/root/secret"
CHANGED = m.StateChanged(state=State.SERVING)
HELD = m.MemoryHeld(nbytes=7)
MEMORY = m.Memory(key={}, device="CPU-0")
ATTACH = m.Attach(key={}, device="CPU-0")
GRANTED = m.Granted(generation="0a" * 16, lease=LEASE, backend="host", manifest=1, chunks=(1, 1))


class Desk:
    """Answers `memory`, grants `fds`, tells watchers without end; any other request breaks it."""

    def __init__(self, fds=()):
        self.fds = fds
        self.left = []

    async def __call__(self, session: Session) -> None:
        try:
            async for request in session:
                match request:
                    case m.Memory():
                        await session.answer(HELD)
                    case m.Attach():
                        await session.answer(GRANTED, self.fds)
                    case m.Release():
                        await session.answer(m.Done())
                    case m.Watch():
                        while await session.answer(CHANGED):
                            pass
                    case _:
                        raise KeyError(SECRET)
        finally:
            self.left.append(session.lease)


class Caller:
    """A client of one's own making, in the same event loop."""

    def __init__(self, path: Path):
        self.link = Link(seqpacket.connect(path))

    def ask(self, request: m.Request) -> None:
        self.send(codec.encode(request))

    def send(self, data: bytes, fds=()) -> None:
        assert self.link.send_now(data, fds) is None

    async def told(self) -> m.Reply | None:
        """The next reply; None at the end."""
        with anyio.fail_after(2):
            with closing(await self.link.receive()) as packet:
                return None if packet.eof else codec.decode_reply(packet.data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()


@asynccontextmanager
async def serving(
    path: Path, handler=None, admit=peers.peer, listener=None, resumed=(), **limits
) -> AsyncIterator[None]:
    """A server at `path` (or of a `listener`), for as long as the block lasts."""
    server = Server(handler or Desk(), admit, Limits(**limits))
    listener = listener or listen(path, 0o600, 16)
    with listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, listener)
            for sock in resumed:
                tasks.start_soon(server.resume, sock, LEASE, peers.peer(sock))
            yield
            tasks.cancel_scope.cancel()


@pytest.fixture
def path(socket_dir):
    return socket_dir / "rank.sock"


async def good(path: Path) -> None:
    """A client that behaves is answered at once, whatever others do."""
    with Caller(path) as caller, anyio.fail_after(0.5):
        caller.ask(MEMORY)
        assert await caller.told() == HELD


async def test_many_clients_are_served_at_once(path, fds):
    async with serving(path, Desk(fds)):
        callers = [Caller(path) for _ in range(10)]
        for caller in callers:
            caller.ask(ATTACH)
        assert [await caller.told() for caller in callers] == [GRANTED] * 10
        for caller in callers:
            caller.link.close()


async def test_the_handler_learns_that_its_client_left(path, fds):
    desk = Desk(fds)
    async with serving(path, desk):
        with Caller(path) as caller:
            caller.ask(ATTACH)
            await caller.told()
        await good(path)
        assert desk.left[0] == LEASE


# Clients that misbehave.

BAD = {
    "silent": None,
    "empty": b"",
    "garbage": b"\xff" * 100,
    "right version": b"\1garbage",
    "other version": b"\2" + codec.encode(MEMORY)[1:],
    "wrong direction": codec.encode(HELD),
    "too long": b"\1" * (m.MAX_PACKET + 1),
    "breaks the handler": codec.encode(m.Load()),
}


@pytest.mark.parametrize("packet", BAD.values(), ids=BAD)
@pytest.mark.parametrize("count", [0, 3])
async def test_a_bad_client_is_hung_up_on_and_nobody_else(path, fds, packet, count):
    async with serving(path, speak=0.05):
        with Caller(path) as bad:
            if packet is not None:
                bad.link.socket.sendmsg(
                    [packet],
                    [
                        (socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.fileno().to_bytes(4, "little"))
                        for fd in fds[:count]
                    ],
                )
            await good(path)
            while (reply := await bad.told()) is not None:
                assert isinstance(reply, m.Refused)
        await good(path)


async def test_a_client_that_sends_without_pause_leaves_time_for_others(path):
    async with serving(path):
        with Caller(path) as flood:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pour, flood.link)
                await good(path)
                tasks.cancel_scope.cancel()


async def pour(link: Link) -> None:
    with pytest.raises(OSError):
        while True:
            await link.send(codec.encode(MEMORY))
            await anyio.lowlevel.checkpoint()


async def test_a_client_that_does_not_read_is_hung_up_on_and_nobody_else(path, caplog):
    def admit(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return peers.peer(sock)

    async with serving(path, admit=admit, send=0.05):
        with Caller(path) as slow:
            slow.ask(m.Watch())
            await anyio.wait_readable(slow.link.socket)
            await good(path)
            await anyio.sleep(0.06)
            with anyio.fail_after(2):
                while await slow.told():
                    pass
        await good(path)
    assert caplog.text.count("did not read for 0.05 s") == 1


async def test_what_the_handler_raises_is_logged_and_not_told(path, caplog):
    async with serving(path):
        with Caller(path) as caller:
            caller.ask(m.Load())
            reply = await caller.told()
            assert reply.code == ErrorCode.INTERNAL
            assert SECRET not in reply.detail
            assert await caller.told() is None
    assert f"KeyError: '{SECRET}'" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_handler_may_hang_up(path):
    async def handler(session):
        await anext(session)
        await session.answer(HELD)

    async with serving(path, handler):
        with Caller(path) as caller:
            caller.ask(MEMORY)
            assert [await caller.told(), await caller.told()] == [HELD, None]


# Clients that are turned away.


async def test_a_stranger_is_told_so_and_not_read(path, fds):
    def admit(sock):
        raise AccessDenied("user 1000 is not served: list it in access.users")

    desk = Desk(fds)
    async with serving(path, desk, admit):
        for early in (True, False):
            with Caller(path) as caller:
                if early:
                    caller.ask(ATTACH)
                reply = await caller.told()
                assert (reply.code, await caller.told()) == (ErrorCode.DENIED, None)
                assert "access.users" in reply.detail
    assert desk.left == []


async def test_who_cannot_be_told_apart_is_turned_away(path, caplog):
    def admit(sock):
        raise OSError(SECRET)

    async with serving(path, admit=admit):
        with Caller(path) as caller:
            reply = await caller.told()
            assert (reply.code, await caller.told()) == (ErrorCode.INTERNAL, None)
            assert SECRET not in reply.detail
    assert SECRET in caplog.text


async def test_too_many_clients_are_told_to_come_back(path, caplog):
    async with serving(path, connections=2):
        with Caller(path) as first:
            with Caller(path) as second:
                for caller in (first, second):
                    caller.ask(MEMORY)
                    await caller.told()
                for _ in range(3):
                    with Caller(path) as third:
                        reply = await third.told()
                        assert (reply.reason, await third.told()) == (m.Reason.BUSY, None)
                        assert "2 clients" in reply.detail
            await anyio.wait_all_tasks_blocked()
            await good(path)
    assert caplog.text.count("was turned away") == 1


async def test_one_user_cannot_take_the_room_of_others_nor_two_that_of_the_daemons(
    path, caplog, monkeypatch
):
    """Of six connections a user may have two; two are kept for root and the daemon's own user."""
    monkeypatch.setattr("os.geteuid", lambda: 7)
    users = iter([1000, 1000, 1000, 1001, 1000, 1001, 1002, 7, 0, 0, 1000])

    def admit(sock):
        return Peer(1, next(users), frozenset())

    async with serving(path, admit=admit, connections=6):
        stay: list[Caller] = []

        async def comes(refusal: str) -> None:
            caller = Caller(path)
            stay.append(caller)
            caller.ask(MEMORY)
            told = await caller.told()
            if refusal:
                assert told.reason is m.Reason.BUSY
                assert re.search(f"{refusal}.*`ss -xp`", told.detail)
            else:
                assert told == HELD

        own = "user 1000 has 2 connections already, as many as one may have"
        for refusal in ["", "", own, "", own, "", "4 clients .* kept for the daemons", "", ""]:
            await comes(refusal)
        await comes("6 clients are connected already")
        stay[0].link.close()
        await anyio.wait_all_tasks_blocked()
        await comes("")
        for caller in stay:
            caller.link.close()
    # Each kind once: a user that tries again for ever hides no other.
    assert [
        re.sub(": try.*", "", each).partition("more may be: ")[2] for each in caplog.messages
    ] == [
        own,
        "4 clients are connected already, and the rest is kept for the daemons",
        "6 clients are connected already",
    ]


# The daemon's own limits and ends.


@pytest.mark.slow
async def test_without_descriptors_the_daemon_waits_and_says_so_once(
    path, caplog, descriptors_left
):
    async with serving(path):
        callers = []
        with descriptors_left(3):
            for _ in range(3):
                callers.append(Caller(path))
                callers[-1].ask(MEMORY)
            await anyio.sleep(0.15)
            # Whoever leaves makes room, but not for long.
            callers.pop(0).link.close()
            assert await callers[0].told() == HELD
            await anyio.sleep(0.15)
        assert await callers[1].told() == HELD
        for caller in callers:
            caller.link.close()
    assert caplog.text.count("accepting a client: this process may have") == 1
    assert "LimitNOFILE=" in caplog.text


async def test_what_is_no_listener_is_an_error(pair):
    server = Server(Desk(), peers.peer, Limits())
    seqpacket.send(pair[1], b"so that it is readable")
    with pytest.raises(ExceptionGroup) as caught:
        await server.serve(pair[0])
    assert caught.group_contains(OSError, match="Invalid argument")


async def test_a_daemon_that_ends_leaves_parked_leases_to_the_next_one(path, fds):
    desk = Desk(fds)
    parked = []

    async def parking(session):
        parked.append(socket.fromfd(session.fileno(), socket.AF_UNIX, socket.SOCK_SEQPACKET))
        await desk(session)

    async with serving(path, parking):
        caller = Caller(path)
        caller.ask(ATTACH)
        assert await caller.told() == GRANTED
    with closing(caller.link):
        async with serving(path, desk, resumed=parked, speak=0.0):
            caller.ask(m.Release())
            assert await caller.told() == m.Done()
    assert desk.left == [LEASE, None]


async def test_a_lease_that_breaks_the_protocol_ends_though_it_is_parked(path, fds, pair):
    ours, theirs = pair
    async with serving(path, resumed=[ours.dup()]):
        seqpacket.send(theirs, b"garbage")
        caller = Link(theirs)
        assert not (await caller.receive()).eof
        assert (await caller.receive()).eof


async def test_resumed_leases_count(path, pair):
    ours, _ = pair
    async with serving(path, resumed=[ours.dup()], connections=1):
        await anyio.wait_all_tasks_blocked()
        with Caller(path) as caller:
            assert (await caller.told()).reason is m.Reason.BUSY


async def test_an_inherited_listener_serves_who_came_before(path):
    listener = listen(path, 0o600, 16)
    with Caller(path) as caller:
        caller.ask(MEMORY)
        async with serving(path, listener=listener):
            assert await caller.told() == HELD


@pytest.mark.parametrize("steps", range(6))
async def test_a_daemon_that_ends_at_once_leaves_no_socket_open(path, steps):
    listener = listen(path, 0o600, 16)
    with Caller(path) as caller:
        async with serving(path, listener=listener):
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
        with suppress(ConnectionResetError):
            assert await caller.told() is None


async def test_the_blocking_client_and_this_server_understand_each_other(path, fds):
    def attach_and_release() -> list[m.Reply]:
        with connect(path, timeout=1) as client:
            replies = [client.call(MEMORY, timeout=1).reply]
            granted, received = client.call(ATTACH, timeout=1)
            for fd in received:
                fd.close()
            assert len(received) == len(fds)
            return [*replies, granted, client.call(m.Release(), timeout=1).reply]

    def ask_once() -> list[m.Reply]:
        with connect(path, timeout=1) as client:
            return [client.call(ATTACH, timeout=1).reply]

    async with serving(path, Desk(fds)):
        replies = await anyio.to_thread.run_sync(attach_and_release)
        assert replies == [HELD, GRANTED, m.Done()]
    async with serving(path, connections=0):
        (busy,) = await anyio.to_thread.run_sync(ask_once)
        assert busy.reason is m.Reason.BUSY
