import errno
import socket
from contextlib import ExitStack, suppress

import anyio
import pytest

from preloadd.transport import tcp
from preloadd.transport.tcp import Port, Wire
from tests.ports import free_port

pytestmark = pytest.mark.anyio

HERE = "127.0.0.1"


@pytest.fixture
def free() -> int:
    return free_port()


@pytest.fixture
def wires():
    """Two ends of one connection."""
    pair = tuple(map(Wire, _pair()))
    yield pair
    for wire in pair:
        wire.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HERE, 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


async def test_a_connection_carries_bytes_both_ways(free):
    (listener,) = await tcp.listen(HERE, free)
    with listener:
        wire = await tcp.connect(HERE, free)
        await anyio.wait_readable(listener)
        other = Wire(listener.accept()[0])
        wire.post(b"hello")
        assert await other.receive() == b"hello"
        other.post(b"there")
        assert await wire.receive() == b"there"
        wire.close()
        assert await other.receive() == b""
        other.close()


async def test_where_nobody_listens_that_is_said(free):
    with pytest.raises(OSError) as caught:
        await tcp.connect(HERE, free)
    assert caught.value.errno == errno.ECONNREFUSED
    assert caught.value.strerror


async def test_a_taken_port_is_an_error_and_a_left_one_is_none(free):
    (listener,) = await tcp.listen(HERE, free)
    with listener, pytest.raises(OSError) as caught:
        await tcp.listen(HERE, free)
    assert caught.value.errno == errno.EADDRINUSE
    (again,) = await tcp.listen(HERE, free)
    again.close()


async def is_let_in(port, came, there):
    """A guest that comes once `there` holds is taken, and is in `came` until here."""
    with anyio.fail_after(2):
        while not there():  # noqa: ASYNC110
            await anyio.sleep(0.005)
        with socket.create_connection((HERE, port)):
            while not came:  # noqa: ASYNC110
                await anyio.sleep(0.005)
    came.pop().close()


async def test_a_port_is_tried_again_while_it_is_taken_and_says_so_once(free, monkeypatch, caplog):
    monkeypatch.setattr(tcp, "_AGAIN_S", 0.02)
    port = Port(lambda: tcp.listen(HERE, free), lambda error: f"no port: {error.strerror}")
    came = []
    async with anyio.create_task_group() as tasks:
        with socket.create_server((HERE, free)):
            tasks.start_soon(port.serve, lambda sock, _: came.append(sock), "a guest")
            await port.tried.wait()
            await anyio.sleep(0.1)
            assert port.fault == "no port: Address already in use"
        await is_let_in(free, came, lambda: not port.fault)
        tasks.cancel_scope.cancel()
    assert caplog.messages == ["no port: Address already in use"]


async def test_a_listener_that_is_lost_is_told_and_listened_for_anew(free, monkeypatch, caplog):
    monkeypatch.setattr(tcp, "_AGAIN_S", 0.02)
    made, came = [], []

    async def listen():
        made.append(await tcp.listen(HERE, free))
        return made[-1]

    port = Port(listen, lambda error: f"no port: {error.strerror}")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(port.serve, lambda sock, _: came.append(sock), "a guest")
        await port.tried.wait()
        made[0][0].shutdown(socket.SHUT_RDWR)
        await is_let_in(free, came, lambda: len(made) == 2 and not port.fault)
        tasks.cancel_scope.cancel()
    assert caplog.messages == ["no port: Invalid argument"]


def meaning(*hosts: str):
    """A resolver that knows one name, for all of these."""

    async def resolve(_: str, port: int, **more):
        return [each for host in hosts for each in socket.getaddrinfo(host, port, **more)]

    return resolve


async def test_a_name_is_listened_at_where_this_host_has_its_addresses(free, monkeypatch):
    """Names may have one twice, and others that are switched off."""
    monkeypatch.setattr(anyio, "getaddrinfo", meaning("2001:db8::1", HERE, HERE, "192.0.2.1"))
    (listener,) = await tcp.listen("node-0", free)
    with listener:
        assert listener.getsockname() == (HERE, free)
        with pytest.raises(OSError) as caught:
            await tcp.listen("node-0", free)
    assert caught.value.errno == errno.EADDRINUSE


async def test_an_address_that_swallows_all_leaves_time_for_the_next(free, monkeypatch):
    """A full backlog does so, as a firewall does."""
    both, first = meaning("127.0.0.2", HERE), meaning("127.0.0.2")

    async def resolve(name: str, port: int, **more):
        return await (both if name == "node-0" else first)(name, port, **more)

    monkeypatch.setattr(anyio, "getaddrinfo", resolve)
    with socket.create_server(("127.0.0.2", free), backlog=0) as full, ExitStack() as owned:
        for _ in range(4):
            waiting = owned.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        with pytest.raises(ConnectionRefusedError), anyio.fail_after(0.4):
            await tcp.connect("node-0", free)
        with pytest.raises(TimeoutError), anyio.fail_after(0.05):
            await tcp.connect("127.0.0.2", free)
        with socket.create_server((HERE, free)), anyio.fail_after(0.4):
            wire = await tcp.connect("node-0", free)
        wire.close()


async def test_an_address_of_another_host_is_an_error(free):
    with pytest.raises(OSError) as caught:
        await tcp.listen("192.0.2.1", free)
    assert caught.value.errno == errno.EADDRNOTAVAIL


async def test_what_does_not_fit_at_once_arrives_all_the_same(wires):
    ours, theirs = wires
    sent = bytes(range(256)) * 3000
    found = bytearray()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.write)
        for start in range(0, len(sent), 50_000):
            ours.post(sent[start : start + 50_000])
        ours.finish()
        ours.post(b"no more")
        while data := await theirs.receive():
            found += data
        tasks.cancel_scope.cancel()
    assert found == sent


async def test_a_peer_that_reads_nothing_is_hung_up_on(wires):
    ours, _ = wires
    for _ in range(200):
        ours.post(bytes(100_000))
    assert ours.finished
    with anyio.fail_after(5):
        assert await ours.receive() == b""


async def test_posting_to_a_peer_that_is_gone_is_no_error(wires):
    ours, theirs = wires
    theirs.hang_up()
    theirs.close()
    for _ in range(3):
        ours.post(b"x")
        await anyio.sleep(0.01)
    with suppress(ConnectionError):
        assert await ours.receive() == b""


async def test_all_is_sent_however_slowly_it_is_read(wires):
    one, other = wires
    got = bytearray()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.send, b"x" * (8 << 20))
        while len(got) < 8 << 20:
            got += await other.receive()
    assert not got.strip(b"x")


async def test_sending_to_who_is_gone_fails(wires):
    one, other = wires
    other.hang_up()
    with pytest.raises(OSError):
        await one.send(b"x" * (8 << 20))
