import os
import socket
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from preloadd.errors import AccessDenied, ProtocolViolation, Unavailable
from preloadd.linux import seqpacket
from preloadd.linux.locks import Lock
from preloadd.protocol import codec
from preloadd.protocol.messages import Done, NotAvailable, Reason, Refused
from preloadd.supervisor.line import HIDDEN, Line
from tests.unit.supervisor.given import told

pytestmark = pytest.mark.anyio


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket]]:
    ours, theirs = seqpacket.pair()
    with Line(ours, Path("/run/CPU-0/rank.sock")) as line, theirs:
        yield line, theirs


async def test_asks_again_and_again(ends):
    line, rank = ends
    for pid in (1, 2):
        await line.ask()
        rank.recv(1 << 16)
        rank.send(codec.encode(told("CPU-0", pid=pid)))
        assert (await line.answer()).pid == pid


async def test_waiting_can_be_given_up_and_taken_up_again(ends):
    line, rank = ends
    await line.ask()
    with anyio.move_on_after(0.01) as waiting:
        await line.answer()
    assert waiting.cancelled_caught
    rank.send(codec.encode(told("CPU-0", pid=3)))
    assert (await line.answer()).pid == 3


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        (Refused(code="denied", detail="user 5 may not"), AccessDenied, "user 5 may not"),
        (Refused(code="internal", detail="see log"), ProtocolViolation, "see log"),
        (NotAvailable(reason=Reason.BUSY, detail="256 clients"), ProtocolViolation, "256 clients"),
        (Done(), ProtocolViolation, "done"),
    ],
)
async def test_what_is_no_status_is_an_error(ends, reply, error, said):
    line, rank = ends
    await line.ask()
    rank.send(codec.encode(reply))
    with pytest.raises(error, match=said):
        await line.answer()


async def test_a_rank_that_hangs_up_is_named(ends):
    line, rank = ends
    rank.close()
    with pytest.raises(Unavailable, match=r"/run/CPU-0/rank\.sock"):
        await line.ask()


async def test_a_rank_that_hangs_up_instead_of_answering_is_named(ends):
    line, rank = ends
    await line.ask()
    rank.close()
    with pytest.raises(Unavailable, match=r"/run/CPU-0/rank\.sock"):
        await line.answer()


async def test_nobody_there(socket_dir):
    with pytest.raises(Unavailable, match="no daemon serves there"):
        await Line.open(socket_dir / "rank.sock")


async def test_a_daemon_that_does_not_listen_yet_is_told_apart_from_none(ranks):
    # What was killed left its socket.
    ranks.listen("CPU-0").close()
    path = ranks.socket_dir / "CPU-0" / "rank.sock"
    with Lock.take(path.parent, "CPU-0"):
        with pytest.raises(Unavailable, match=f"process {os.getpid()} runs and") as caught:
            await Line.open(path)
        assert caught.value.reason == Reason.STARTING
    with pytest.raises(Unavailable, match="its daemon has ended") as caught:
        await Line.open(path)
    assert caught.value.reason == "absent"


async def test_a_daemon_whose_socket_was_removed_is_not_said_to_start(socket_dir):
    path = socket_dir / "rank.sock"
    with (
        Lock.take(socket_dir, "CPU-0"),
        seqpacket.Reservation(path, 0o600) as reserved,
        reserved.listen(1),
    ):
        path.unlink()
        with pytest.raises(Unavailable, match=f"its socket {path} was removed") as caught:
            await Line.open(path)
    assert caught.value.reason == HIDDEN


async def test_a_full_queue_is_told_at_once(ranks):
    listener = ranks.listen("CPU-0", backlog=0)
    path = ranks.socket_dir / "CPU-0" / "rank.sock"
    with listener, await Line.open(path), pytest.raises(Unavailable, match="stuck") as caught:
        await Line.open(path)
    assert caught.value.reason == Reason.BUSY
