"""Whoever connects is taken, and nothing that befalls the host ends that."""

import errno
import socket
from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest

from preloadd.transport import accepting
from preloadd.transport.accepting import accept

pytestmark = pytest.mark.anyio


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


class Taken(list):
    """Whoever was taken, and from where."""

    def __call__(self, sock, address):
        self.append(address)
        sock.close()


@asynccontextmanager
async def serving(listener):
    taken = Taken()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(accept, listener, taken, "a guest")
        yield taken
        tasks.cancel_scope.cancel()


async def reached(taken, count):
    with anyio.fail_after(2):
        while len(taken) < count:  # noqa: ASYNC110
            await anyio.sleep(0.005)


async def test_who_connects_is_taken_with_its_address(listener):
    async with serving(listener) as taken:
        with socket.create_connection(listener.getsockname()) as guest:
            await reached(taken, 1)
            assert taken == [guest.getsockname()]


async def test_many_are_taken_few_at_a_time(listener):
    guests = [socket.create_connection(listener.getsockname()) for _ in range(30)]
    steps = [0]
    async with serving(listener) as taken:
        with anyio.fail_after(2):
            while steps[-1] < len(guests):
                await anyio.lowlevel.checkpoint()
                steps.append(len(taken))
    for guest in guests:
        guest.close()
    assert max(b - a for a, b in pairwise(steps)) == accepting._AT_ONCE


async def test_without_descriptors_it_waits_and_says_so_once_an_episode(
    listener, descriptors_left, monkeypatch, caplog
):
    monkeypatch.setattr(accepting, "_BACK_OFF", 0.01)

    async def starve(taken) -> None:
        """There is room again after a while, and whoever waited is taken."""
        before = len(taken)
        with socket.socket() as guest:
            with descriptors_left(0):
                guest.connect(listener.getsockname())
                await anyio.sleep(0.1)
                assert len(taken) == before
            await reached(taken, before + 1)

    async with serving(listener) as taken:
        await starve(taken)
        await starve(taken)
        (told,) = caplog.messages
        assert told.startswith("accepting a guest: this process may have ")
        assert "LimitNOFILE=" in told
        assert told.endswith("; trying again every 0.01 s")
        monkeypatch.setattr(accepting, "_QUIET", 0.05)
        await anyio.sleep(0.06)
        await starve(taken)
    assert caplog.messages == [told, told]


async def test_an_error_of_the_network_is_not_the_end(monkeypatch, caplog):
    """Linux hands out those of a new connection; a socket without connections has one at hand."""
    monkeypatch.setattr(accepting, "_BACK_OFF", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        theirs.send(b"so that it is readable")
        async with serving(ours):
            await anyio.sleep(0.05)
    assert len(caplog.messages) == 1
    assert "accepting a guest: [Errno 95] Operation not supported; trying" in caplog.text


async def test_what_is_no_listener_is_an_error():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"so that it is readable")
        with pytest.raises(OSError, match="Invalid argument"):
            await accept(ours, Taken(), "a guest")


async def test_what_goes_wrong_with_a_guest_is_no_trouble_of_the_listener(listener):
    def take(sock, _):
        sock.close()
        raise OSError(errno.EINVAL, "of the guest")

    with socket.create_connection(listener.getsockname()), pytest.raises(OSError, match="guest"):
        with anyio.fail_after(2):
            await accept(listener, take, "a guest")


async def test_a_guest_that_is_gone_already_is_no_end(listener):
    def take(sock, _):
        sock.close()
        raise ConnectionError

    with socket.create_connection(listener.getsockname()), pytest.raises(ConnectionError):
        with anyio.fail_after(2):
            await accept(listener, take, "a guest")
