import logging
import os
import socket
from contextlib import closing

import anyio
import pytest

from preloadd.domain.access import Peer
from preloadd.domain.ids import LeaseId
from preloadd.domain.lifecycle import State
from preloadd.errors import ErrorCode, OutOfDescriptors, ProtocolViolation
from preloadd.linux import seqpacket
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.protocol.connection import ServerConnection
from preloadd.transport.aio import Limits, Link, Session

pytestmark = pytest.mark.anyio

PEER = Peer(pid=4711, uid=1000, gids=frozenset())
LEASE = LeaseId("0b" * 8)
CHANGED = m.StateChanged(state=State.SERVING)
HELD = m.MemoryHeld(nbytes=7)
MEMORY = m.Memory(key={}, device="CPU-0")
ATTACH = m.Attach(key={}, device="CPU-0")
GRANTED = m.Granted(generation="0a" * 16, lease=LEASE, backend="host", manifest=1, chunks=(1, 1))


def session(
    sock: socket.socket,
    connection: ServerConnection | None = None,
    *,
    speak: float = 5.0,
    send: float = 5.0,
) -> Session:
    connection = connection or ServerConnection(deadline=anyio.current_time() + speak)
    return Session(Link(sock), connection, PEER, Limits(speak, send))


def ask(sock: socket.socket, *requests: m.Request) -> None:
    for request in requests:
        seqpacket.send(sock, codec.encode(request))


def told(sock: socket.socket) -> m.Reply | None:
    """What the client finds waiting for it; None if that is the end."""
    sock.settimeout(2)
    with closing(seqpacket.receive(sock, m.MAX_PACKET)) as packet:
        return None if packet.eof else codec.decode_reply(packet.data)


def fill(sock: socket.socket) -> int:
    """Send until the peer would have to read; how many packets went."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            sock.send(b"x" * 500, socket.MSG_DONTWAIT)
            sent += 1
    return sent


class TestLink:
    async def test_receives_a_packet_with_its_descriptors(self, pair, fds):
        ours, theirs = pair
        seqpacket.send(theirs, b"packet", [fd.fileno() for fd in fds])
        with closing(await Link(ours).receive()) as packet:
            assert packet.data == b"packet"
            assert [os.pread(fd.fileno(), 9, 0) for fd in packet.fds] == [b"\0", b"\1", b"\2"]
            assert not any(os.get_inheritable(fd.fileno()) for fd in packet.fds)

    async def test_waits_for_a_packet_while_others_run(self, pair):
        ours, theirs = pair
        async with anyio.create_task_group() as others:
            others.start_soon(anyio.to_thread.run_sync, seqpacket.send, theirs, b"late")
            assert (await Link(ours).receive()).data == b"late"

    async def test_a_cancelled_wait_loses_nothing(self, pair):
        ours, theirs = pair
        link = Link(ours)
        with anyio.move_on_after(0.01):
            await link.receive()
        seqpacket.send(theirs, b"packet")
        assert (await link.receive()).data == b"packet"

    async def test_what_a_peer_said_before_it_hung_up_on_us_is_received(self, pair):
        ours, theirs = pair
        seqpacket.send(ours, b"never read")
        seqpacket.send(theirs, b"last word")
        theirs.close()
        link = Link(ours)
        assert (await link.receive()).data == b"last word"
        assert (await link.receive()).eof

    async def test_sends_to_a_peer_that_reads_late(self, pair):
        ours, theirs = pair
        before = fill(ours)
        with anyio.fail_after(1):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Link(ours).send, b"last")
                await anyio.wait_all_tasks_blocked()
                received = [seqpacket.receive(theirs, 999).data for _ in range(before)]
        assert set(received) == {b"x" * 500}
        assert seqpacket.receive(theirs, 999).data == b"last"

    async def test_sends_once_the_descriptors_in_flight_have_landed(self, pair, fds, in_flight):
        ours, theirs = pair
        link = Link(ours)
        with anyio.move_on_after(0.03) as waited:
            await link.send(b"packet", [fds[0]])
        assert waited.cancelled_caught
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.send, b"packet", [fds[0]])
            await anyio.wait_all_tasks_blocked()
            in_flight()
        with closing(seqpacket.receive(theirs, 999)) as packet:
            assert (packet.data, len(packet.fds)) == (b"packet", 1)

    async def test_a_peer_that_is_gone_is_an_error_to_send_to(self, pair):
        ours, theirs = pair
        theirs.close()
        with pytest.raises(BrokenPipeError):
            await Link(ours).send(b"packet")

    async def test_a_packet_cut_by_the_kernel_is_an_error_and_the_next_is_whole(self, pair, fds):
        ours, theirs = pair
        seqpacket.send(theirs, b"x" * (m.MAX_PACKET + 1), [fds[0].fileno()])
        seqpacket.send(theirs, b"y" * m.MAX_PACKET)
        link = Link(ours)
        with pytest.raises(ProtocolViolation, match="more than 65536 bytes"):
            await link.receive()
        assert (await link.receive()).data == b"y" * m.MAX_PACKET

    async def test_descriptors_cut_by_the_kernel_are_an_error(self, pair, fds, descriptors_left):
        ours, theirs = pair
        seqpacket.send(theirs, b"packet", [fd.fileno() for fd in fds])
        with descriptors_left(1), pytest.raises(OutOfDescriptors, match="open files"):
            await Link(ours).receive()

    async def test_hanging_up_ends_it_for_copies_of_the_socket_too(self, pair):
        ours, theirs = pair
        with ours.dup():
            link = Link(ours)
            link.hang_up()
            link.close()
            assert told(theirs) is None

    async def test_closing_does_not(self, pair):
        ours, theirs = pair
        with ours.dup() as parked:
            Link(ours).close()
            seqpacket.send(parked, codec.encode(CHANGED))
            assert told(theirs) == CHANGED


class TestSession:
    async def test_requests_come_one_by_one_and_are_answered(self, pair):
        ours, theirs = pair
        ask(theirs, MEMORY, MEMORY)
        one = session(ours)
        async for request in one:
            assert request == MEMORY
            assert await one.answer(HELD)
            if told(theirs) == HELD:
                theirs.shutdown(socket.SHUT_WR)
        assert str(one) == "client 4711 of user 1000"

    async def test_a_grant_takes_its_descriptors_along(self, pair, fds):
        ours, theirs = pair
        ask(theirs, ATTACH)
        one = session(ours)
        assert await anext(one) == ATTACH
        assert one.lease is None
        assert await one.answer(GRANTED, fds)
        assert one.lease == LEASE
        with closing(seqpacket.receive(theirs, m.MAX_PACKET)) as packet:
            assert codec.decode_reply(packet.data) == GRANTED
            assert [os.pread(fd.fileno(), 9, 0) for fd in packet.fds] == [b"\0", b"\1", b"\2"]
        assert not any(fd.closed for fd in fds)

    async def test_a_silent_client_is_hung_up_on(self, pair, caplog):
        ours, theirs = pair
        one = session(ours, speak=0.02)
        assert [request async for request in one] == []
        await one.end()
        assert told(theirs) == m.Refused(code=ErrorCode.PROTOCOL, detail="no request came in time")
        assert told(theirs) is None
        assert "client 4711 of user 1000 was hung up on: no request" in caplog.text

    async def test_a_client_that_has_spoken_may_be_silent(self, pair):
        ours, theirs = pair
        ask(theirs, MEMORY)
        one = session(ours, speak=0.02)
        await anext(one)
        await one.answer(HELD)
        with anyio.move_on_after(0.05) as waited:
            await anext(one)
        assert waited.cancelled_caught

    async def test_a_client_that_does_not_read_is_hung_up_on(self, pair, caplog):
        ours, theirs = pair
        ask(theirs, MEMORY)
        one = session(ours, send=0.02)
        await anext(one)
        fill(ours)
        with ours.dup():
            assert not await one.answer(HELD)
            assert [request async for request in one] == []
            while theirs.recv(999):
                pass
        assert "client 4711 of user 1000 did not read for 0.02 s" in caplog.text

    async def test_other_tasks_may_tell_while_the_session_waits(self, pair):
        ours, theirs = pair
        ask(theirs, m.Watch())
        one = session(ours)
        assert await anext(one) == m.Watch()
        await one.answer(CHANGED)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(one.answer, CHANGED)
            tasks.start_soon(self.until_the_end, one, tasks)
            for _ in range(6):
                await anyio.wait_readable(theirs)
                assert told(theirs) == CHANGED
            theirs.close()

    async def test_tellers_wait_in_line_for_a_client_that_reads_late(self, pair):
        ours, theirs = pair
        ask(theirs, m.Watch())
        one = session(ours)
        await anext(one)
        await one.answer(CHANGED)
        before = fill(ours)
        events = [m.StateChanged(state=state) for state in State]
        async with anyio.create_task_group() as tasks:
            for event in events:
                tasks.start_soon(one.answer, event)
            await anyio.wait_all_tasks_blocked()
            assert told(theirs) == CHANGED
            for _ in range(before):
                theirs.recv(999)
            for event in events:
                await anyio.wait_readable(theirs)
                assert told(theirs) == event

    async def until_the_end(self, one, tasks):
        assert [request async for request in one] == []

    async def test_a_slow_teller_wakes_the_waiting_session(self, pair):
        ours, theirs = pair
        ask(theirs, m.Watch())
        one = session(ours, send=0.02)
        await anext(one)
        await one.answer(CHANGED)
        fill(ours)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.until_the_end, one, tasks)
            assert not await one.answer(CHANGED)

    @pytest.mark.parametrize(
        ("packet", "count", "text"),
        [
            (codec.encode(m.Status()), 1, "no request carries descriptors; this one: 1"),
            (codec.encode(m.Done()), 0, "Invalid value 'done'"),
            (b"\1\x80garbage", 0, "not a request"),
            (b"\2" + codec.encode(m.Status())[1:], 0, "version 2, this side speaks version 1"),
            (b"x" * (m.MAX_PACKET + 1), 3, "more than 65536 bytes"),
        ],
        ids=["descriptors", "direction", "garbage", "version", "long"],
    )
    async def test_a_client_that_breaks_the_protocol_is_told_and_hung_up_on(
        self, pair, fds, caplog, packet, count, text
    ):
        ours, theirs = pair
        seqpacket.send(theirs, packet, [fd.fileno() for fd in fds[:count]])
        one = session(ours)
        assert [request async for request in one] == []
        await one.end()
        reply = told(theirs)
        assert (reply.code, told(theirs)) == (ErrorCode.PROTOCOL, None)
        assert text in reply.detail
        assert reply.detail in caplog.text

    async def test_a_client_whose_descriptors_find_no_room_is_told(
        self, pair, fds, descriptors_left
    ):
        ours, theirs = pair
        seqpacket.send(theirs, codec.encode(m.Status()), [fd.fileno() for fd in fds])
        one = session(ours)
        with descriptors_left(0):
            assert [request async for request in one] == []
        await one.end()
        assert told(theirs).code == ErrorCode.NO_DESCRIPTORS

    async def test_a_request_left_without_an_answer_is_our_fault(self, pair):
        ours, theirs = pair
        ask(theirs, MEMORY)
        one = session(ours)
        await anext(one)
        with pytest.raises(RuntimeError, match="memory was not answered"):
            await anext(one)

    async def test_a_parked_lease_goes_on(self, pair):
        ours, theirs = pair
        one = session(ours, ServerConnection.resumed_lease(LEASE), speak=0.0)
        assert one.lease == LEASE
        ask(theirs, m.Release())
        assert await anext(one) == m.Release()
        await one.answer(m.Done())
        assert told(theirs) == m.Done()
        assert one.lease is None

    async def test_a_client_that_is_gone_is_not_answered(self, pair, caplog):
        ours, theirs = pair
        ask(theirs, MEMORY)
        one = session(ours)
        await anext(one)
        theirs.close()
        with caplog.at_level(logging.DEBUG):
            assert not await one.answer(HELD)
        assert "has hung up" in caplog.text
        assert not await one.answer(HELD)
        await one.end(RuntimeError("too late to tell"))

    async def test_an_answer_that_was_cancelled_ends_the_connection(self, pair):
        """The client would take the next answer for the one it missed."""
        ours, theirs = pair
        ask(theirs, MEMORY)
        one = session(ours)
        await anext(one)
        fill(ours)
        with anyio.move_on_after(0.01):
            await one.answer(HELD)
        assert [request async for request in one] == []
        while theirs.recv(999):
            pass

    async def test_closed_descriptors_are_never_granted(self, pair, fds):
        ours, theirs = pair
        ask(theirs, ATTACH)
        one = session(ours)
        await anext(one)
        fds[1].close()
        with pytest.raises(ValueError, match="closed or taken"):
            await one.answer(GRANTED, fds)
        assert told(theirs) is None

    async def test_an_answer_the_kernel_refuses_ends_the_connection(self, pair, caplog):
        ours, theirs = pair
        ask(theirs, MEMORY)
        one = session(ours)
        await anext(one)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        long = m.Mismatched(fields=(m.Field(name="x", daemon="d" * 9000, engine=""),))
        assert not await one.answer(long)
        assert "cannot be answered, so it was hung up on: [Errno 90]" in caplog.text
        assert told(theirs) is None

    async def test_what_ends_a_session_is_told(self, pair):
        ours, theirs = pair
        await session(ours).end(ProtocolViolation("enough"))
        assert told(theirs) == m.Refused(code=ErrorCode.PROTOCOL, detail="enough")
        assert told(theirs) is None
