"""Rank 0's port, with strangers of every kind at it."""

import socket
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from preloadd.domain.settings import Rendezvous
from preloadd.protocol.rendezvous.convener import Convener
from preloadd.protocol.rendezvous.frames import Frames, decode_from_convener, encode
from preloadd.protocol.rendezvous.messages import (
    Agreed,
    Beat,
    Done,
    Ended,
    Failed,
    FromConvener,
    Join,
)
from preloadd.rank.rendezvous import hall as module
from preloadd.rank.rendezvous.hall import Hall
from preloadd.transport import tcp
from tests.ports import free_port

pytestmark = pytest.mark.anyio

HERE = "127.0.0.1"


@pytest.fixture
def place() -> Rendezvous:
    return Rendezvous(HERE, free_port(), rank=0, world=2, node=0, nodes=2)


def join(rank: int, **changes) -> Join:
    fields = {
        "preloadd": "1.0",
        "group": "tests",
        "role": "target",
        "builder": "native",
        "world": 2,
        "rank": rank,
        "node": rank,
        "nodes": 2,
        "key": {"checkpoint": "full:00"},
    }
    return Join(**fields | changes)


class Own:
    """What rank 0 itself was told."""

    def __init__(self) -> None:
        self.heard: list[FromConvener] = []


@asynccontextmanager
async def serving(place, own=None):
    own = own or Own()
    convener = Convener(place, patience=30.0, silence=5.0)
    hall = Hall(convener, place, own.heard.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hall.serve)
        await hall.port.tried.wait()
        yield hall
        tasks.cancel_scope.cancel()


class Guest:
    def __init__(self, wire: tcp.Wire) -> None:
        self.wire = wire
        self._frames = Frames()
        self._found: list[FromConvener] = []

    def say(self, *messages) -> None:
        for message in messages:
            self.wire.post(encode(message))

    async def hear(self) -> FromConvener | None:
        """The next message; None at the end."""
        with anyio.fail_after(5):
            while not self._found:
                try:
                    data = await self.wire.receive()
                except ConnectionError:
                    return None
                if not data:
                    return None
                self._found += map(decode_from_convener, self._frames.receive(data))
        return self._found.pop(0)


@asynccontextmanager
async def visiting(place):
    guest = Guest(await tcp.connect(place.address, place.port))
    try:
        yield guest
    finally:
        guest.wire.close()


async def test_all_that_come_are_let_go(place):
    own = Own()
    async with serving(place, own) as hall, visiting(place) as guest:
        guest.say(join(1))
        assert (await guest.hear()).missing == (0,)
        hall.say(join(0))
        assert await guest.hear() == Agreed()
        assert own.heard == [Agreed()]
        guest.say(Done())


async def test_who_is_turned_away_reads_why_and_then_the_end(place):
    async with serving(place) as hall, visiting(place) as guest:
        guest.say(join(1, world=3), Beat())
        ended = await guest.hear()
        assert "give all nodes the same sizes" in ended.why
        assert await guest.hear() is None
        guest.wire.close()
        await hall.farewell()
        async with visiting(place) as other:
            other.say(join(1))
            assert (await other.hear()).missing == (0,)


async def test_a_guest_that_hangs_up_is_lost(place):
    own = Own()
    async with serving(place, own) as hall:
        hall.say(join(0, world=2))
        async with visiting(place) as guest:
            guest.say(join(1))
            assert await guest.hear() == Agreed()
        with anyio.fail_after(5):
            while len(own.heard) < 3:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        assert "rank 1 of node 1 was lost while loading: it hung up" in own.heard[-1].why


GARBAGE = [b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\0", b"\0\0\0\x03\xc1\xc1\xc1", b"\xff" * 4096]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_ends_the_connection_it_came_on_and_nothing_else(place, garbage):
    async with serving(place), visiting(place) as good:
        good.say(join(1))
        assert (await good.hear()).missing == (0,)
        async with visiting(place) as bad:
            bad.wire.post(garbage)
            assert await bad.hear() is None
        async with visiting(place) as later:
            later.say(join(1))
            assert "is here already" in (await later.hear()).why


async def test_garbage_of_a_rank_that_has_joined_is_its_loss(place):
    own = Own()
    async with serving(place, own) as hall, visiting(place) as guest:
        hall.say(join(0))
        guest.say(join(1))
        assert await guest.hear() == Agreed()
        guest.wire.post(b"\0\0\0\x01\xc1")
        assert await guest.hear() is None
        with anyio.fail_after(5):
            while not isinstance(own.heard[-1], Ended):  # noqa: ASYNC110
                await anyio.sleep(0.005)
        assert "rank 1 of node 1 was lost while loading: it broke the protocol" in own.heard[-1].why


async def test_a_stranger_that_says_nothing_is_hung_up_on_after_a_while(place, monkeypatch):
    monkeypatch.setattr(module, "JOIN_S", 0.1)
    async with serving(place), visiting(place) as guest:
        assert await guest.hear() is None


async def test_no_more_are_let_in_than_could_be_needed(place, caplog):
    async with serving(place) as hall:
        async with anyio.create_task_group() as tasks:
            left = []

            async def stay() -> None:
                async with visiting(place) as guest:
                    left.append(await guest.hear())

            for _ in range(30):
                tasks.start_soon(stay)
            with anyio.fail_after(5):
                while len(left) < 10:  # noqa: ASYNC110
                    await anyio.sleep(0.005)
            tasks.cancel_scope.cancel()
        assert [line for line in caplog.messages if "are open" in line] == [
            "20 connections are open: who says nothing makes room for more"
        ]
        with anyio.fail_after(5):
            while hall._guests:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        async with visiting(place) as guest:
            guest.say(join(1))
            assert (await guest.hear()).missing == (0,)


async def test_a_rank_gets_in_however_many_strangers_say_nothing(place):
    async with serving(place), AsyncExitStack() as visits:
        for _ in range(30):
            await visits.enter_async_context(visiting(place))
        good = await visits.enter_async_context(visiting(place))
        good.say(join(1))
        assert (await good.hear()).missing == (0,)
        for _ in range(30):
            await visits.enter_async_context(visiting(place))
        good.say(Failed(why="still here"))
        assert isinstance(await good.hear(), Ended)


async def test_without_descriptors_it_waits_for_some(place, descriptors_left, caplog):
    async with serving(place):
        with socket.socket() as sock:
            with descriptors_left(0):
                sock.connect((HERE, place.port))
                await anyio.sleep(0.25)
            assert caplog.text.count("accepting a rank: this process may have") == 1
            assert "LimitNOFILE=" in caplog.text
        async with visiting(place) as guest:
            guest.say(join(1))
            assert (await guest.hear()).missing == (0,)
    assert len(caplog.messages) == 1
