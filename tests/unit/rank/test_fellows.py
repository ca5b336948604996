from contextlib import asynccontextmanager

import anyio
import pytest

from preloadd.domain.lifecycle import State
from preloadd.linux import peers
from preloadd.protocol.messages import StateChanged
from preloadd.rank.fellows import Fellows
from preloadd.transport.aio import Limits, Session
from preloadd.transport.server import Server
from tests.listening import listen

pytestmark = pytest.mark.anyio


class Fellow:
    """A rank that tells whoever watches what state it is in."""

    def __init__(self, path) -> None:
        self.path = path
        self.state = State.LOADING
        self.warming = ""
        self.checkpoint = ""
        self._changed = anyio.Event()

    def enter(self, state: State) -> None:
        self.state = state
        self._changed.set()
        self._changed = anyio.Event()

    @asynccontextmanager
    async def listening(self):
        async with anyio.create_task_group() as tasks:
            with listen(self.path, 0o600, 8) as listener:
                tasks.start_soon(Server(self._tell, peers.peer, Limits()).serve, listener)
                yield
                tasks.cancel_scope.cancel()
        self.path.unlink()

    async def _tell(self, session: Session) -> None:
        async for _ in session:
            while await session.answer(
                StateChanged(state=self.state, warming=self.warming, checkpoint=self.checkpoint)
            ):
                await self._changed.wait()


@pytest.fixture
def fellow(socket_dir):
    return Fellow(socket_dir / "rank.sock")


@asynccontextmanager
async def following(fellow):
    fellows = Fellows({"CPU-1": fellow.path})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fellows.follow)
        yield fellows
        tasks.cancel_scope.cancel()


async def until_missing(fellows, missing):
    with anyio.fail_after(5):
        while fellows.missing != missing:  # noqa: ASYNC110
            await anyio.sleep(0.002)


async def test_a_rank_without_fellows_is_whole_at_once():
    fellows = Fellows({})
    assert await fellows.whole(0.0)
    assert fellows.missing == []


async def test_a_fellow_that_is_not_there_is_missing_until_it_serves(fellow):
    async with following(fellow) as fellows:
        assert not await fellows.whole(0.1)
        assert fellows.missing == ["CPU-1"]
        async with fellow.listening():
            assert not await fellows.whole(0.2)
            fellow.enter(State.SERVING)
            assert await fellows.whole(5.0)


async def test_a_fellow_that_ends_or_changes_is_missing_again(fellow):
    fellow.state = State.SERVING
    async with following(fellow) as fellows:
        async with fellow.listening():
            assert await fellows.whole(5.0)
            fellow.enter(State.RELEASED)
            await until_missing(fellows, ["CPU-1"])
            fellow.enter(State.SERVING)
            assert await fellows.whole(5.0)
        await until_missing(fellows, ["CPU-1"])
        async with fellow.listening():
            assert await fellows.whole(5.0)


async def test_whoever_listens_there_and_lies_is_missing(fellow):
    with listen(fellow.path, 0o600, 8) as listener:

        async def lie() -> None:
            while True:
                await anyio.wait_readable(listener)
                sock, _ = listener.accept()
                with sock:
                    sock.send(b"\x01nonsense")

        listener.setblocking(False)
        async with following(fellow) as fellows, anyio.create_task_group() as tasks:
            tasks.start_soon(lie)
            assert not await fellows.whole(0.3)
            tasks.cancel_scope.cancel()
    fellow.path.unlink()


async def test_a_fellow_that_warms_up_has_a_gate_as_long_as_it_says_so(fellow):
    fellow.state, fellow.warming = State.SERVING, "ab" * 32
    async with following(fellow) as fellows:
        async with fellow.listening():
            assert await fellows.whole(5.0)
            assert fellows.warming == {"ab" * 32}
            fellow.warming = ""
            fellow.enter(State.SERVING)
            with anyio.fail_after(5):
                while fellows.warming:  # noqa: ASYNC110
                    await anyio.sleep(0.002)
            fellow.warming = "cd" * 32
            fellow.enter(State.SERVING)
            with anyio.fail_after(5):
                while not fellows.warming:  # noqa: ASYNC110
                    await anyio.sleep(0.002)
        await until_missing(fellows, ["CPU-1"])
        assert fellows.warming == frozenset()


async def test_a_fellow_that_serves_another_checkpoint_is_apart(fellow):
    fellow.state, fellow.checkpoint = State.SERVING, "sampled-1:00"
    async with following(fellow) as fellows:
        assert fellows.apart("sampled-1:01") == []
        async with fellow.listening():
            assert await fellows.whole(5.0)
            assert fellows.apart("sampled-1:01") == ["CPU-1"]
            assert fellows.apart("sampled-1:00") == fellows.apart("") == []
            # An earlier release tells none.
            fellow.checkpoint = ""
            fellow.enter(State.SERVING)
            with anyio.fail_after(5):
                while fellows.apart("sampled-1:01"):  # noqa: ASYNC110
                    await anyio.sleep(0.002)
