import errno
import logging
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from preloadd.domain.ids import Role
from preloadd.domain.settings import Rendezvous
from preloadd.rank.rendezvous.port import no_port, port_at
from preloadd.transport import tcp
from tests.ports import free_port

pytestmark = pytest.mark.anyio

HERE = "127.0.0.1"


@pytest.fixture
def place() -> Rendezvous:
    return Rendezvous(HERE, free_port(), rank=0, world=2, node=0, nodes=2)


@asynccontextmanager
async def tried(place):
    """The port there, or what is wrong with it, while it is served."""
    port = port_at(place)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(port.serve, lambda sock, _: sock.close(), "a rank")
        await port.tried.wait()
        yield port
        tasks.cancel_scope.cancel()


async def test_a_port_that_is_taken_is_told_once_and_tried_again(place, caplog, monkeypatch):
    monkeypatch.setattr(tcp, "_AGAIN_S", 0.02)
    with caplog.at_level(logging.WARNING):
        with socket.create_server((HERE, place.port)) as server:
            async with tried(place) as port:
                assert f"port {place.port} is taken" in port.fault
                await anyio.sleep(0.1)
                server.close()
                with anyio.fail_after(5):
                    while port.fault:  # noqa: ASYNC110
                        await anyio.sleep(0.005)
    assert len([line for line in caplog.messages if "is taken" in line]) == 1


async def test_a_name_by_which_this_host_means_itself_is_no_place_to_meet(place, monkeypatch):
    real = anyio.getaddrinfo
    monkeypatch.setattr(anyio, "getaddrinfo", lambda _, port, **more: real(HERE, port, **more))
    async with tried(replace(place, address="node-0.example")) as port:
        assert "node-0.example" in port.fault
        assert "on this host it means 127.0.0.1, which no other host can reach" in port.fault


async def test_a_name_that_nobody_knows_is_told_with_what_to_give(place):
    # Names end with this where it is agreed that there are none (RFC 6761).
    async with tried(replace(place, address="node-0.invalid")) as port:
        assert "this host does not know node-0.invalid (" in port.fault
        assert port.fault.endswith("name of node 0 that each of them knows, or its address")


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EADDRINUSE, "ss -ltnp"),
        (errno.EADDRNOTAVAIL, "127.0.0.1 is no address of this host, which has rank 0: give all"),
        (errno.EADDRNOTAVAIL, "if this is not the first node, give it a node_rank (data_parallel_"),
        (errno.EACCES, "give all nodes another weight_cache_master_port, from 1024 up"),
        (errno.ENOBUFS, "no leave"),
    ],
)
def test_what_is_wrong_with_a_port_is_said(place, number, told):
    text = no_port(place, OSError(number, "no leave"))
    assert f"{HERE}:{place.port}" in text
    assert told in text
    other = replace(place, address="fd00::1", port=29600)
    assert "meet at [fd00::1]:29600: " in no_port(other, OSError(number, "no leave"))


def test_the_port_of_a_draft_is_told_by_its_own_setting(place):
    draft = replace(place, role=Role.DRAFT)
    for number in (errno.EADDRINUSE, errno.EACCES):
        told = no_port(draft, OSError(number, "no"))
        assert told.startswith("the ranks of this group's draft cannot meet at ")
        assert "give all nodes another weight_cache_draft_master_port" in told
