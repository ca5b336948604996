import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.ids import LeaseId
from preloadd.domain.lifecycle import State
from preloadd.errors import AccessDenied, ErrorCode, ProtocolViolation
from preloadd.protocol import codec, payload
from preloadd.protocol import messages as m
from preloadd.protocol.connection import MAX_WAITING, ClientConnection, Phase, ServerConnection

LEASE = LeaseId("0b" * 8)
ATTACH = m.Attach(key={}, device="CPU-0")
MEMORY = m.Memory(key={}, device="CPU-0")
GRANTED = m.Granted(
    generation="0a" * 16, lease=LEASE, backend="host", manifest=900, chunks=(512, 1024)
)
HANDLES = ("manifest", "chunk 0", "chunk 1")
MISMATCHED = m.Mismatched(fields=(m.Field(name="dtype", daemon="a", engine="b"),))
TOLD = m.StatusTold(
    group="g",
    instance="CPU-0",
    device="CPU-0",
    role="target",
    pid=1,
    version="1",
    state=State.SERVING,
)
CHANGED = m.StateChanged(state=State.SERVING)
ASKED = m.WarmupAsked(kind="k", config_hash="ab" * 32)
WARM = m.WarmupTold(names=("a", "b"), sizes=(1, 2))
ANSWERS = [
    (ATTACH, GRANTED),
    (ATTACH, MISMATCHED),
    (MEMORY, m.MemoryHeld(nbytes=0)),
    (MEMORY, MISMATCHED),
    (m.Release(), m.Done()),
    (m.Load(), m.Done()),
    (m.Profiling(active=True), m.Done()),
    (m.Status(), TOLD),
    (m.Watch(), CHANGED),
    (ASKED, WARM),
    (ASKED, m.WarmupTold()),
]
ALWAYS = [m.NotAvailable(reason=m.Reason.LOADING, detail=""), m.Refused(code="denied", detail="")]


def handles_of(reply: m.Reply) -> tuple[str, ...]:
    if isinstance(reply, m.WarmupTold):
        return HANDLES[: len(reply.names)]
    return HANDLES[: 1 + len(reply.chunks)] if isinstance(reply, m.Granted) else ()


def server_asked(*requests: m.Request) -> ServerConnection[str]:
    """A server's end that was asked, and has not answered yet."""
    server = ServerConnection[str]()
    for request in requests:
        assert server.receive(codec.encode(request)) == [request]
    return server


def client_asking(request: m.Request) -> ClientConnection[str]:
    client = ClientConnection[str]()
    client.request(request)
    return client


def leased() -> tuple[ServerConnection[str], ClientConnection[str]]:
    """Both ends after a grant."""
    server, client = server_asked(ATTACH), client_asking(ATTACH)
    server.answer(GRANTED, HANDLES)
    client.receive(*only(server))
    return server, client


def watching() -> tuple[ServerConnection[str], ClientConnection[str]]:
    server, client = server_asked(m.Watch()), client_asking(m.Watch())
    server.answer(CHANGED)
    client.receive(*only(server))
    return server, client


def only(server: ServerConnection[str]) -> tuple[bytes, tuple[str, ...]]:
    """The one packet the server has to send."""
    (outgoing,) = server.pending()
    return outgoing.data, outgoing.handles


def farewell(server: ServerConnection[str]) -> m.Reply:
    """What a server that has closed still has to say."""
    assert server.phase is Phase.CLOSED
    data, handles = only(server)
    assert handles == ()
    return codec.decode_reply(data)


# What may be asked and answered.


@pytest.mark.parametrize(
    ("request_", "answer"),
    [*ANSWERS, *((asked, reply) for asked, _ in ANSWERS for reply in ALWAYS)],
)
def test_a_request_and_its_answer_pass_through_both_ends(request_, answer):
    server, client = ServerConnection[str](), ClientConnection[str]()
    outgoing = client.request(request_)
    assert server.receive(outgoing.data, outgoing.handles) == [request_]
    server.answer(answer, handles_of(answer))
    data, handles = only(server)
    assert handles == handles_of(answer)
    assert client.receive(data, handles) == answer
    assert server.phase is client.phase
    assert server.pending() == []


def test_what_does_not_answer_a_request_is_wrong_on_both_ends(asked, reply):
    fits = any(type(asked) is type(a) and type(reply) is type(b) for a, b in ANSWERS)
    if fits or isinstance(reply, (m.NotAvailable, m.Refused)):
        return
    server, client = server_asked(asked), client_asking(asked)
    with pytest.raises(ValueError, match=f"{codec.tag(asked)} is answered with"):
        server.answer(reply, handles_of(reply))
    assert server.pending() == []
    with pytest.raises(ProtocolViolation, match=f"answered {codec.tag(asked)} with"):
        client.receive(codec.encode(reply), handles_of(reply))
    assert client.phase is Phase.CLOSED


def test_an_answer_to_nothing_is_wrong_on_both_ends():
    with pytest.raises(ValueError, match="no request is answered with done"):
        ServerConnection[str]().answer(m.Done())
    with pytest.raises(ProtocolViolation, match="answered no request with done"):
        ClientConnection[str]().receive(codec.encode(m.Done()))


def test_answers_go_out_in_the_order_of_the_requests():
    server = server_asked(m.Status(), MEMORY, m.Status())
    server.answer(TOLD)
    server.answer(m.MemoryHeld(nbytes=7))
    assert [codec.decode_reply(out.data) for out in server.pending()] == [
        TOLD,
        m.MemoryHeld(nbytes=7),
    ]
    assert list(server.waiting) == [m.Status()]


def test_a_client_asks_one_by_one():
    client = client_asking(m.Status())
    with pytest.raises(ProtocolViolation, match="status has no answer yet"):
        client.request(m.Status())


def test_a_request_that_does_not_fit_was_not_asked():
    client = ClientConnection[str]()
    with pytest.raises(ProtocolViolation, match="key field 'long'"):
        client.request(m.Attach(key={"long": "x" * 70_000}, device="CPU-0"))
    client.request(m.Status())


# Leases and watches.


def test_after_a_grant_the_connection_is_the_lease():
    for end in leased():
        assert (end.phase, end.lease) == (Phase.LEASED, LEASE)


@pytest.mark.parametrize("change", [ATTACH, m.Watch()], ids=codec.tag)
def test_a_lease_is_nothing_else_besides(change):
    server, client = leased()
    with pytest.raises(ProtocolViolation, match="is a lease"):
        client.request(change)
    assert server.receive(codec.encode(change)) == []
    assert "is a lease" in str(server.violation)


def test_a_lease_ends_with_its_release():
    server, client = leased()
    server.receive(client.request(m.Release()).data)
    server.answer(m.Done())
    client.receive(*only(server))
    for end in (server, client):
        assert (end.phase, end.lease) == (Phase.IDLE, None)


def test_a_lease_stays_whatever_is_answered_but_done_to_its_release():
    server, client = leased()
    profiling = m.Profiling(active=True)
    for request, reply in ((m.Release(), ALWAYS[1]), (m.Status(), TOLD), (profiling, m.Done())):
        server.receive(client.request(request).data)
        server.answer(reply)
        assert client.receive(*only(server)) == reply
        assert (server.lease, client.lease) == (LEASE, LEASE)


def test_a_parked_lease_goes_on():
    server = ServerConnection[str].resumed_lease(LEASE)
    assert (server.phase, server.lease, server.deadline) == (Phase.LEASED, LEASE, math.inf)
    server.receive(codec.encode(m.Release()))
    server.answer(m.Done())
    assert (server.phase, server.lease) == (Phase.IDLE, None)


def test_a_watching_client_is_told_at_any_time_and_asks_no_more():
    server, client = watching()
    for _ in range(3):
        server.answer(CHANGED)
        assert client.receive(*only(server)) == CHANGED
    with pytest.raises(ProtocolViolation, match="status on a connection that is watching"):
        client.request(m.Status())
    assert server.receive(codec.encode(m.Status())) == []
    assert "is watching" in farewell(server).detail


def test_a_watching_client_learns_that_the_daemon_gives_up():
    server, client = watching()
    server.abort(RuntimeError("secret"))
    assert client.receive(*only(server)).code == ErrorCode.INTERNAL
    assert client.phase is Phase.CLOSED


def test_a_lease_is_told_nothing_unasked():
    _, client = leased()
    with pytest.raises(ProtocolViolation, match="answered no request with state"):
        client.receive(codec.encode(CHANGED))


# Violations.


def test_a_request_is_accepted_whole_and_without_handles_or_not_at_all(asked):
    packet = codec.encode(asked)
    for length in range(len(packet) + 1):
        for count in range(3):
            server = ServerConnection[str]()
            found = server.receive(packet[:length], HANDLES[:count])
            if (length, count) == (len(packet), 0):
                assert (found, server.violation) == ([asked], None)
                continue
            assert found == []
            assert farewell(server) == m.Refused(
                code=ErrorCode.PROTOCOL, detail=str(server.violation)
            )


def test_a_reply_is_accepted_whole_and_with_its_handles_or_not_at_all(reply):
    asked = next(
        asked for asked, answer in [*ANSWERS, (m.Load(), reply)] if type(answer) is type(reply)
    )
    packet = codec.encode(reply)
    right = len(handles_of(reply))
    for length in range(len(packet) + 1):
        for count in range(6):
            client = client_asking(asked)
            handles = (*HANDLES, "x", "y")[:count]
            if (length, count) == (len(packet), right):
                assert client.receive(packet, handles) == reply
                continue
            with pytest.raises(ProtocolViolation):
                client.receive(packet[:length], handles)
            assert client.phase is Phase.CLOSED
            with pytest.raises(ProtocolViolation, match="closed"):
                client.receive(packet, handles[:right])


@given(st.binary(max_size=100), st.integers(0, 2), st.booleans())
def test_garbage_is_answered_with_one_refusal(garbage, count, versioned):
    server = ServerConnection[str]()
    prefix = bytes((m.VERSION,)) if versioned else b""
    assert server.receive(prefix + garbage, HANDLES[:count]) == []
    assert farewell(server).code == ErrorCode.PROTOCOL
    assert server.receive(codec.encode(m.Status())) == []
    assert server.pending() == []


@given(st.data())
def test_whatever_comes_in_whatever_order_the_server_stands(decoders, data):
    """And it hands on at most so many requests without answers, and says nothing after the end."""
    packets = [codec.encode(message) for samples, _ in decoders for message in samples]
    server = ServerConnection[str]()
    waiting = 0
    for _ in range(data.draw(st.integers(1, 30))):
        closed = server.phase is Phase.CLOSED
        if waiting and data.draw(st.booleans()):
            server.answer(ALWAYS[0])
            waiting -= 1
        else:
            packet = data.draw(st.sampled_from(packets[:7]) | st.sampled_from(packets))
            waiting += len(server.receive(packet, data.draw(st.sampled_from([(), (), ("h",)]))))
        assert waiting <= MAX_WAITING
        sent = server.pending()
        assert not (closed and sent)
        if server.phase is Phase.CLOSED:
            waiting = 0


def test_a_client_with_another_version_is_told_both():
    server = ServerConnection[str]()
    server.receive(b"\x02" + codec.encode(m.Status())[1:])
    assert "version 2, this side speaks version 1" in farewell(server).detail


def test_a_reply_is_no_request(reply):
    server = ServerConnection[str]()
    server.receive(codec.encode(reply))
    assert codec.tag(reply) in farewell(server).detail


def test_a_request_is_no_reply(asked):
    with pytest.raises(ProtocolViolation, match=codec.tag(asked)):
        client_asking(m.Status()).receive(codec.encode(asked))


def test_too_many_requests_without_answers_are_a_violation():
    server = server_asked(*(m.Status(),) * MAX_WAITING)
    assert server.receive(codec.encode(m.Status())) == []
    assert f"more than {MAX_WAITING} requests" in farewell(server).detail
    assert not server.waiting


@pytest.mark.parametrize("change", [ATTACH, m.Watch()], ids=codec.tag)
def test_what_changes_a_connection_is_asked_alone(change):
    for first, second in ((change, m.Status()), (m.Status(), change), (change, change)):
        server = server_asked(first)
        assert server.receive(codec.encode(second)) == []
        assert "ask one by one" in farewell(server).detail


@pytest.mark.parametrize(
    ("lie", "count", "text"),
    [
        ({"chunks": ()}, 1, "0 chunks"),
        ({"chunks": (512,) * 129}, 130, "129 chunks; 1 to 128"),
        ({"chunks": (512, 0)}, 3, "chunks of 0"),
        ({"chunks": (512, -1)}, 3, "chunks of -1"),
        ({"manifest": 0}, 3, "a manifest of 0 bytes"),
        ({"manifest": payload.MAX_NBYTES + 1}, 3, "a manifest of 268435457 bytes"),
        ({"generation": "../../etc"}, 3, "'../../etc' is no generation id"),
        ({"lease": "0B" * 8}, 3, "is no lease id"),
        ({}, 2, "2 descriptors for a manifest and 2 chunks"),
        ({}, 4, "4 descriptors for a manifest and 2 chunks"),
    ],
)
def test_a_grant_that_does_not_add_up_is_neither_sent_nor_believed(lie, count, text):
    granted = msgspec.structs.replace(GRANTED, **lie)
    handles = ("h",) * count
    with pytest.raises(ProtocolViolation, match=f"the daemon's granted: .*{text}"):
        client_asking(ATTACH).receive(codec.encode(granted), handles)
    server = server_asked(ATTACH)
    with pytest.raises(ValueError, match=text):
        server.answer(granted, handles)
    assert server.pending() == []


def test_as_many_chunks_as_are_allowed_are_granted():
    granted = msgspec.structs.replace(GRANTED, chunks=(1 << 32,) * 128)
    server = server_asked(ATTACH)
    server.answer(granted, ["h"] * 129)
    assert client_asking(ATTACH).receive(*only(server)) == granted


def test_negative_memory_is_not_believed():
    with pytest.raises(ProtocolViolation, match="-1 bytes"):
        client_asking(MEMORY).receive(codec.encode(m.MemoryHeld(nbytes=-1)))


# Ends.


def test_a_client_that_says_nothing_is_told_so_at_its_deadline():
    server = ServerConnection[str](deadline=10.0)
    assert server.deadline == 10.0
    server.expire(9.9)
    assert server.phase is Phase.NEW
    server.expire(10.0)
    assert "no request came in time" in farewell(server).detail


def test_a_client_that_has_spoken_has_no_deadline():
    server = ServerConnection[str](deadline=10.0)
    server.receive(codec.encode(m.Status()))
    assert server.deadline == math.inf
    server.expire(1e9)
    assert server.phase is Phase.IDLE


def test_a_client_that_is_gone_is_not_answered():
    server = server_asked(m.Status())
    server.receive_eof()
    server.answer(TOLD)
    server.abort(RuntimeError("late"))
    assert (server.pending(), server.phase) == ([], Phase.CLOSED)


def test_answers_before_the_end_are_still_sent():
    server = server_asked(m.Status(), m.Status())
    server.answer(TOLD)
    server.receive(b"garbage")
    assert [type(codec.decode_reply(out.data)) for out in server.pending()] == [
        m.StatusTold,
        m.Refused,
    ]


def test_a_client_there_is_no_room_for_is_told_before_it_asks():
    server, client = ServerConnection[str](), ClientConnection[str]()
    server.turn_away(m.Reason.BUSY, "256 clients")
    data, handles = only(server)
    client.request(ATTACH)
    assert client.receive(data, handles).reason is m.Reason.BUSY
    assert server.receive(codec.encode(ATTACH)) == []


def test_texts_of_unexpected_errors_do_not_travel():
    server = server_asked(m.Status())
    server.abort(KeyError("/root/secret"))
    reply = farewell(server)
    assert reply.code == ErrorCode.INTERNAL
    assert "secret" not in reply.detail
    assert server.violation is None


def test_texts_of_our_own_errors_travel():
    server = ServerConnection[str]()
    server.abort(AccessDenied("user 7 is not served"))
    assert farewell(server) == m.Refused(code=ErrorCode.DENIED, detail="user 7 is not served")
    assert server.violation is None


def test_a_closed_client_asks_nothing():
    client = ClientConnection[str]()
    client.receive_eof()
    with pytest.raises(ProtocolViolation, match="status on a connection that is closed"):
        client.request(m.Status())


def test_a_refusal_that_nothing_was_asked_for_ends_the_connection():
    client = ClientConnection[str]()
    assert client.receive(codec.encode(ALWAYS[1])) == ALWAYS[1]
    assert client.phase is Phase.CLOSED


@pytest.mark.parametrize(
    ("told", "handles"),
    [
        (m.WarmupTold(names=("a",), sizes=(1,)), ()),
        (m.WarmupTold(names=("a",), sizes=()), HANDLES[:1]),
        (m.WarmupTold(names=(), sizes=()), HANDLES[:1]),
        (m.WarmupTold(names=("a", "a"), sizes=(1, 1)), HANDLES[:2]),
        (m.WarmupTold(names=("a",), sizes=(0,)), HANDLES[:1]),
        (
            m.WarmupTold(
                names=tuple(map(str, range(m.MAX_WARMUP + 1))), sizes=(1,) * (m.MAX_WARMUP + 1)
            ),
            ("h",) * (m.MAX_WARMUP + 1),
        ),
    ],
)
def test_warm_up_state_comes_as_it_is_told(told, handles):
    with pytest.raises(ProtocolViolation, match="warmup-told"):
        client_asking(ASKED).receive(codec.encode(told), handles)
    with pytest.raises(ValueError, match="warmup-told"):
        server_asked(ASKED).answer(told, handles)
