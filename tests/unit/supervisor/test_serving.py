"""HTTP for more clients than there is room for, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import anyio
import anyio.to_thread
import pytest
from fastapi import FastAPI

from preloadd.supervisor.serving import MOST, Server

pytestmark = pytest.mark.anyio

LIVEZ = b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n"


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, int]]:
    app = FastAPI()

    @app.get("/livez")
    async def livez() -> bool:
        return True

    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(app, listener)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run_until_signal)
        yield listener.getsockname()
        server.should_exit = True


async def connected(owned: ExitStack, address: tuple[str, int]) -> socket.socket:
    client = owned.enter_context(socket.create_connection(address, timeout=5))
    # It is let in before the next one comes.
    await anyio.sleep(0.002)
    return client


async def said(client: socket.socket) -> bytes:
    return await anyio.to_thread.run_sync(client.recv, 1 << 16)


async def hung_up_on(client: socket.socket) -> bool:
    try:
        return await said(client) == b""
    except ConnectionResetError:
        return True


async def test_those_that_came_first_make_room(caplog):
    with ExitStack() as owned:
        async with serving() as address:
            clients = [await connected(owned, address) for _ in range(MOST)]
            for client in clients:
                client.sendall(LIVEZ[:8])
            more = [await connected(owned, address) for _ in range(3)]
            for client in more:
                client.sendall(LIVEZ)
            assert [(await said(client))[:15] for client in more] == [b"HTTP/1.1 200 OK"] * 3
            assert all([await hung_up_on(client) for client in clients[:3]])
            clients[3].sendall(LIVEZ[8:])
            assert (await said(clients[3])).startswith(b"HTTP/1.1 200 OK")
            assert caplog.text.count("HTTP clients are connected") == 1


async def test_who_has_left_takes_no_room(caplog):
    with ExitStack() as owned:
        async with serving() as address:
            first = await connected(owned, address)
            for _ in range(2 * MOST):
                client = await connected(owned, address)
                client.close()
            first.sendall(LIVEZ)
            assert (await said(first)).startswith(b"HTTP/1.1 200 OK")
            assert caplog.text == ""


async def test_a_listener_that_is_lost_ends_it():
    listener = socket.create_server(("127.0.0.1", 0))
    asyncio.get_running_loop().call_later(0.1, listener.shutdown, socket.SHUT_RDWR)
    with anyio.fail_after(5), pytest.raises(OSError, match="Invalid argument"):
        await Server(FastAPI(), listener).run_until_signal()


async def test_nobody_is_let_in_any_more_once_it_stops():
    with ExitStack() as owned:
        async with serving() as address:
            client = await connected(owned, address)
            client.sendall(LIVEZ)
            assert (await said(client)).startswith(b"HTTP/1.1 200 OK")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)
