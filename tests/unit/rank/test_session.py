"""The desk over real sockets: what each request does to the service, and what ends a lease."""

import dataclasses
import socket
import threading
from contextlib import asynccontextmanager, closing

import anyio
import msgspec
import pytest

from preloadd.domain.access import Peer, Policy
from preloadd.domain.leases import Lease, Mode
from preloadd.domain.lifecycle import State
from preloadd.errors import ErrorCode
from preloadd.linux import seqpacket
from preloadd.linux.memfd import read_sealed
from preloadd.linux.notify import Notifier
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.protocol.connection import ServerConnection
from preloadd.rank import session
from preloadd.rank.fellows import Fellows
from preloadd.rank.gate import Gate
from preloadd.rank.parking import Parking
from preloadd.rank.service import Service
from preloadd.rank.session import Desk
from preloadd.transport.aio import Limits, Link, Session
from preloadd.transport.threads import MOST
from tests.descriptors import open_descriptors
from tests.unit.rank.generations import ID, KEY

pytestmark = pytest.mark.anyio

OPERATOR, GUEST = Peer(7, 0, frozenset({0})), Peer(8, 1000, frozenset({1000}))
ATTACH = m.Attach(key=KEY, device="CPU-0", mode=Mode.COPY, client="engine")


class Client:
    """One end of a socket pair; the other one is a session at the desk."""

    reads = False

    def __init__(self, sock: socket.socket) -> None:
        self.link = Link(sock)

    async def ask(self, request: m.Request) -> m.Reply | None:
        """The answer; None at the end. Descriptors are counted and closed."""
        await self.link.send(codec.encode(request))
        return await self.told()

    async def told(self) -> m.Reply | None:
        with anyio.fail_after(5):
            with closing(await self.link.receive()) as packet:
                self.fds = len(packet.fds)
                self.contents = [_content(fd) for fd in packet.fds] if self.reads else []
                return None if packet.eof else codec.decode_reply(packet.data)

    def leave(self) -> None:
        self.link.close()


def _content(fd) -> bytes:
    return read_sealed(fd.fileno(), 1 << 20)


def serving(generation: str) -> m.StateChanged:
    """What a watcher hears of a rank that serves."""
    return m.StateChanged(state=State.SERVING, generation=generation, checkpoint=KEY["checkpoint"])


class Stage:
    def __init__(self, service: Service, tasks, fellows: Fellows, warm=None) -> None:
        self.service = service
        self.tasks = tasks
        self._desk = Desk(service, Policy(owner=0), fellows, warm or {})
        self._links: list[Link] = []

    def client(self, peer: Peer = GUEST, *, lease: Lease | None = None) -> Client:
        """A client at the desk, maybe with a lease from an earlier daemon."""
        ours, theirs = seqpacket.pair()
        connection = ServerConnection.resumed_lease(lease.id) if lease else ServerConnection()
        self._links.append(Link(ours))
        session = Session(self._links[-1], connection, peer, Limits())
        self.tasks.start_soon(self._serve, session)
        client = Client(theirs)
        self._links.append(client.link)
        return client

    def cancel(self) -> None:
        """Cancel everything, as a daemon does that was told to stop."""
        self.tasks.cancel_scope.cancel()

    async def _serve(self, session: Session) -> None:
        await self._desk.serve(session)
        await session.end()

    async def leases(self, number: int) -> None:
        """Wait until there are so many leases."""
        with anyio.fail_after(5):
            while self.service.status().lease_count != number:  # noqa: ASYNC110
                await anyio.sleep(0.001)

    def close(self) -> None:
        for link in self._links:
            link.close()


@asynccontextmanager
async def staged(settings, generation, fellows=None, notifier=None, warm=None):
    parking = Parking(notifier or Notifier({}))
    async with anyio.create_task_group() as tasks:
        service = Service(settings, parking, clock=anyio.current_time)
        service.adopted(generation)
        tasks.start_soon(parking.work)
        desk = Stage(service, tasks, fellows or Fellows({}), warm)
        with closing(service), closing(desk) as stage:
            try:
                yield stage
            finally:
                if not tasks.cancel_scope.cancel_called:
                    await parking.settle()  # so that every order has been carried out
                tasks.cancel_scope.cancel()


@pytest.fixture
async def stage(settings, make):
    async with staged(settings, make()) as stage:
        yield stage


async def test_a_client_asks_one_thing_after_the_other(stage):
    client = stage.client()
    assert (await client.ask(m.Status())).state is State.SERVING
    assert isinstance(await client.ask(m.Memory(key=KEY, device="CPU-0")), m.MemoryHeld)
    assert isinstance(await client.ask(m.Attach(key={}, device="CPU-0")), m.Mismatched)
    assert (await client.ask(m.Load())).code == ErrorCode.DENIED
    assert stage.service.status().lease_count == 0


async def test_a_lease_lasts_as_long_as_its_connection(stage):
    before = open_descriptors()
    client = stage.client()
    granted = await client.ask(ATTACH)
    assert (granted.generation, client.fds) == (ID, 3)
    (lease,) = stage.service.status().leases
    assert (lease.id, lease.client, lease.pid, lease.mode) == (
        granted.lease,
        "engine",
        GUEST.pid,
        Mode.COPY,
    )
    client.leave()
    await stage.leases(0)
    assert open_descriptors() <= before + 2


async def test_a_client_that_leaves_before_the_grant_holds_nothing(stage):
    client = stage.client()
    await client.link.send(codec.encode(ATTACH))
    client.leave()
    await anyio.sleep(0.01)
    await stage.leases(0)


async def test_a_lease_that_breaks_the_protocol_ends(stage):
    client = stage.client()
    await client.ask(ATTACH)
    assert (await client.ask(m.Watch())).code == ErrorCode.PROTOCOL
    assert await client.told() is None
    await stage.leases(0)


async def test_what_is_released_is_no_lease_any_more_but_the_connection_goes_on(stage):
    client = stage.client()
    await client.ask(ATTACH)
    assert await client.ask(m.Release()) == m.Done()
    await stage.leases(0)
    assert (await client.ask(m.Status())).state is State.RELEASED
    assert (await client.ask(ATTACH)).reason == m.Reason.RELEASED


async def test_a_refused_release_leaves_the_lease(stage):
    one, other = stage.client(), stage.client()
    await one.ask(ATTACH)
    await other.ask(ATTACH)
    assert (await one.ask(m.Release())).code == ErrorCode.DENIED
    await stage.leases(2)
    other.leave()
    await stage.leases(1)
    assert await one.ask(m.Release()) == m.Done()


async def test_operators_release_and_load_and_others_do_not(stage):
    guest, operator = stage.client(), stage.client(OPERATOR)
    assert (await guest.ask(m.Release())).code == ErrorCode.DENIED
    assert await operator.ask(m.Release()) == m.Done()
    assert (await guest.ask(m.Load())).code == ErrorCode.DENIED
    assert await operator.ask(m.Load()) == m.Done()
    assert stage.service.load_wanted.is_set()


async def test_a_lease_of_an_earlier_daemon_goes_on(stage):
    lease = Lease("0b" * 8, ID, Mode.COPY, "engine", 7)
    stage.service.lease_began(lease, None)
    client = stage.client(lease=lease)
    assert (await client.ask(m.Status())).leases[0].id == lease.id
    assert await client.ask(m.Release()) == m.Done()
    await stage.leases(0)


async def test_a_lease_of_an_earlier_daemon_ends_with_its_connection(stage):
    lease = Lease("0b" * 8, ID, Mode.COPY, "engine", 7)
    stage.service.lease_began(lease, None)
    stage.client(lease=lease).leave()
    await stage.leases(0)


async def test_a_watcher_hears_of_every_change_until_it_leaves(stage, make):
    watcher = stage.client()
    first = await watcher.ask(m.Watch())
    assert first == serving(ID)
    stage.service.release(None, operator=True)
    assert await watcher.told() == m.StateChanged(state=State.RELEASED)
    stage.service.load_started()
    assert (await watcher.told()).state is State.LOADING
    stage.service.loaded(make("0d" * 16))
    assert await watcher.told() == serving("0d" * 16)
    assert (await watcher.ask(m.Status())).code == ErrorCode.PROTOCOL
    assert await watcher.told() is None


async def test_many_watchers_hear_of_the_same_change(stage):
    watchers = [stage.client() for _ in range(10)]
    for watcher in watchers:
        await watcher.ask(m.Watch())
    stage.service.stopping()
    for watcher in watchers:
        assert (await watcher.told()).state is State.STOPPING


async def test_watchers_hear_of_the_end_of_a_daemon_that_is_cancelled_at_once(settings, make):
    async with staged(settings, make()) as stage:
        watcher = stage.client()
        await watcher.ask(m.Watch())
        stage.service.stopping()
        stage.cancel()
        with anyio.CancelScope(shield=True):
            assert (await watcher.told()).state is State.STOPPING


async def test_cancelling_leaves_the_lease_as_it_is(settings, make):
    """The daemon goes down, the engine goes on."""
    async with staged(settings, make()) as stage:
        client = stage.client()
        await client.ask(ATTACH)
        service = stage.service
    assert service.status().lease_count == 1


async def test_an_incomplete_group_grants_nothing_and_names_who_is_missing(
    settings, make, socket_dir, monkeypatch
):
    monkeypatch.setattr("preloadd.rank.session._PATIENCE_S", 0.05)
    fellows = Fellows({"CPU-1": socket_dir / "nobody.sock"})
    async with staged(settings, make(), fellows) as stage:
        told = await stage.client().ask(ATTACH)
        assert (told.reason, told.detail.split(": ")[1]) == (m.Reason.INCOMPLETE, "CPU-1")
        other = await stage.client().ask(msgspec.structs.replace(ATTACH, key={"dtype": "int8"}))
        assert isinstance(other, m.Mismatched)


async def test_a_group_of_two_checkpoints_grants_nothing_and_says_what_to_do(
    settings, make, socket_dir, caplog
):
    fellows = Fellows({"CPU-1": socket_dir / "nobody.sock"})
    other = msgspec.structs.replace(serving(ID), checkpoint="another")
    fellows._hear("CPU-1", other)
    async with staged(settings, make(), fellows) as stage:
        told = await stage.client().ask(ATTACH)
        assert told.reason is m.Reason.INCOMPLETE
        assert "CPU-1 and CPU-0 have weights of different checkpoints" in told.detail
        assert "`preloadctl release tests`, then `preloadctl load tests`" in told.detail
        status = await stage.client().ask(m.Status())
        assert status.divided == status.detail == told.detail
        assert [(r.levelname, r.message) for r in caplog.records] == [("WARNING", told.detail)]
        fellows._hear("CPU-1", serving(ID))
        assert isinstance(await stage.client().ask(ATTACH), m.Granted)
        fellows._hear("CPU-1", other)
        await stage.client().ask(m.Status())
        assert caplog.text.count(told.detail) == 2


async def test_what_a_rank_itself_lacks_comes_before_what_its_group_lacks(
    settings, make, socket_dir
):
    fellows = Fellows({"CPU-1": socket_dir / "nobody.sock"})
    async with staged(settings, make(), fellows) as stage:
        assert stage.service.release(None, operator=True) == m.Done()
        with anyio.fail_after(0.5):
            told = await stage.client().ask(ATTACH)
        assert told.reason is m.Reason.RELEASED


# -- profiling --


class Pending:
    """A request whose answer is waited for by a task of its own."""

    def __init__(self, stage: Stage, client: Client, request: m.Request) -> None:
        self.answer: m.Reply | None = None
        self._client, self._request = client, request
        stage.tasks.start_soon(self._ask)

    async def _ask(self) -> None:
        self.answer = await self._client.ask(self._request)

    async def answered(self) -> m.Reply:
        with anyio.fail_after(5):
            while self.answer is None:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        return self.answer


OLD = Lease("0e" * 8, "0d" * 16, Mode.ZERO_COPY, "old", 9)


async def profiler(stage) -> Client:
    """An engine that profiles. Its weights are of an earlier generation: it hinders by no more."""
    stage.service.lease_began(OLD, None)
    client = stage.client(lease=OLD)
    assert await client.ask(m.Profiling(active=True)) == m.Done()
    return client


async def waits(stage, client: Client, request: m.Request) -> Pending:
    """A request that is not answered while everybody else is."""
    pending = Pending(stage, client, request)
    for _ in range(5):
        await anyio.sleep(0.005)
        assert isinstance(await stage.client().ask(m.Status()), m.StatusTold)
    assert pending.answer is None
    return pending


async def test_a_lease_that_was_told_it_is_spared_is_so_by_the_next_daemon_too(
    settings, make, notifier, told
):
    async with staged(settings, make(), notifier=notifier) as stage:
        await profiler(stage)
        assert told() == [("FDSTORE", f"profiling.{OLD.id}", 1)]
        stage.cancel()


async def test_a_manager_that_hangs_does_not_keep_an_engine_waiting_for_long(
    settings, make, notifier, told
):
    async with staged(settings, make(), notifier=notifier) as stage:
        stage.tasks.start_soon(stage.service.settled)  # reads nothing, so this is not answered
        await anyio.sleep(0.01)
        since = anyio.current_time()
        await profiler(stage)
        assert 0.5 < anyio.current_time() - since < 3
        stage.cancel()


async def test_a_client_without_a_lease_does_not_profile(stage):
    refused = await stage.client().ask(m.Profiling(active=True))
    assert (refused.code, "attach first" in refused.detail) == (ErrorCode.UNAVAILABLE, True)


@pytest.mark.parametrize("end", ["says so", "leaves"])
async def test_a_release_waits_until_nobody_profiles(stage, end, caplog):
    caplog.set_level("INFO")
    engine = await profiler(stage)
    release = await waits(stage, stage.client(OPERATOR), m.Release())
    assert stage.service.state is State.SERVING
    assert "a release for client 7 of user 0 waits: old (pid 9) measures free memory" in caplog.text
    if end == "leaves":
        engine.leave()
    else:
        assert await engine.ask(m.Profiling(active=False)) == m.Done()
    assert await release.answered() == m.Done()
    assert stage.service.state is State.RELEASED


async def test_it_waits_no_longer_than_its_deadline(settings, make):
    patience = dataclasses.replace(settings.deadlines, profiling=0.1)
    async with staged(dataclasses.replace(settings, deadlines=patience), make()) as stage:
        await profiler(stage)
        since = anyio.current_time()
        assert await stage.client(OPERATOR).ask(m.Release()) == m.Done()
        assert 0.05 < anyio.current_time() - since < 2


async def test_whoever_profiles_does_not_hold_up_itself(stage):
    client = stage.client()
    await client.ask(ATTACH)
    assert await client.ask(m.Profiling(active=True)) == m.Done()
    assert await client.ask(m.Release()) == m.Done()
    assert stage.service.profilers() == []


async def test_a_release_that_is_not_allowed_does_not_wait(stage):
    await profiler(stage)
    assert (await stage.client().ask(m.Release())).code == ErrorCode.DENIED


async def test_an_engine_that_comes_while_a_release_waits_keeps_its_weights(stage):
    engine = await profiler(stage)
    release = await waits(stage, stage.client(OPERATOR), m.Release())
    assert isinstance(await stage.client().ask(ATTACH), m.Granted)
    await engine.ask(m.Profiling(active=False))
    refused = await release.answered()
    assert (refused.code, "1 other engine(s)" in refused.detail) == (ErrorCode.DENIED, True)
    assert stage.service.state is State.SERVING


async def test_who_hangs_up_while_its_release_waits_has_released(stage):
    engine, copier = await profiler(stage), stage.client()
    await copier.ask(ATTACH)
    await copier.link.send(codec.encode(m.Release()))
    await anyio.sleep(0.01)
    copier.leave()
    assert stage.service.state is State.SERVING
    await engine.ask(m.Profiling(active=False))
    await stage.leases(1)
    assert stage.service.state is State.RELEASED


async def test_a_load_waits_until_nobody_profiles(stage):
    assert stage.service.release(None, operator=True) == m.Done()
    engine = await profiler(stage)
    assert (await stage.client().ask(m.Load())).code == ErrorCode.DENIED
    load = await waits(stage, stage.client(OPERATOR), m.Load())
    assert not stage.service.load_wanted.is_set()
    await engine.ask(m.Profiling(active=False))
    assert await load.answered() == m.Done()
    assert stage.service.load_wanted.is_set()


async def test_a_daemon_that_stops_waits_for_nobody(settings, make):
    async with staged(settings, make()) as stage:
        await profiler(stage)
        await stage.client(OPERATOR).link.send(codec.encode(m.Release()))
        await anyio.sleep(0.01)
        stage.cancel()


# -- warm-up --


def showing(key: str) -> m.Attach:
    return msgspec.structs.replace(ATTACH, rehearsal=key)


async def released(stage: Stage) -> None:
    """Wait until no engine of a warm-up holds weights."""
    with anyio.fail_after(5):
        while stage.service.rehearses:  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def test_a_gate_lets_in_who_shows_the_pass_until_it_is_open(stage):
    gate = stage.service.close_gate()
    told = await stage.client().ask(ATTACH)
    assert (told.reason, "warming up" in told.detail) == (m.Reason.LOADING, True)
    assert (await stage.client().ask(showing(gate.digest))).reason is m.Reason.LOADING
    own = stage.client()
    granted = await own.ask(showing(gate.key))
    assert (gate.leases, stage.service.rehearses) == ({granted.lease}, True)
    status = await stage.client().ask(m.Status())
    assert (status.state, "warming up" in status.detail) == (State.LOADING, True)
    assert (status.lease_count, status.leases) == (0, ())  # of nobody who could be ended
    own.leave()
    await released(stage)
    assert gate.leases == set()
    stage.service.open_gate()
    assert isinstance(await stage.client().ask(ATTACH), m.Granted)
    assert (await stage.client().ask(m.Status())).detail == ""


async def test_a_gate_is_of_attaching_alone_and_other_weights_are_told_first(stage):
    stage.service.close_gate()
    client = stage.client()
    assert isinstance(await client.ask(m.Memory(key=KEY, device="CPU-0")), m.MemoryHeld)
    assert isinstance(await client.ask(m.Attach(key={}, device="CPU-0")), m.Mismatched)


async def test_watchers_hear_of_a_gate_but_not_of_the_pass(stage):
    watcher = stage.client()
    await watcher.ask(m.Watch())
    gate = stage.service.close_gate()
    told = await watcher.told()
    assert (told.warming, gate.key in repr(told)) == (gate.digest, False)
    stage.service.open_gate()
    assert (await watcher.told()).warming == ""


async def test_the_gate_of_a_fellow_is_a_gate_here_too(settings, make, socket_dir):
    gate = Gate()
    fellows = Fellows({})
    fellows._warming["CPU-1"] = gate.digest
    async with staged(settings, make(), fellows) as stage:
        assert (await stage.client().ask(ATTACH)).reason is m.Reason.LOADING
        engine = stage.client()
        assert isinstance(await engine.ask(showing(gate.key)), m.Granted)
        pending = await waits(stage, stage.client(OPERATOR), m.Release())
        fellows._warming.clear()
        fellows._note()
        engine.leave()
        assert await pending.answered() == m.Done()


async def test_the_operators_release_ends_a_warm_up_first(stage):
    gate = stage.service.close_gate()
    engine = stage.client()
    await engine.ask(showing(gate.key))
    assert (await stage.client().ask(m.Release())).code == ErrorCode.DENIED
    assert not gate.ending.is_set()
    pending = await waits(stage, stage.client(OPERATOR), m.Release())
    assert (gate.ending.is_set(), "released" in gate.why) == (True, True)
    stage.service.open_gate()
    await anyio.sleep(0.02)
    engine.leave()
    assert await pending.answered() == m.Done()


async def test_a_release_of_what_is_not_served_yet_does_not_wait_for_a_warm_up(stage):
    assert await stage.client(OPERATOR).ask(m.Release()) == m.Done()
    stage.service.close_gate()
    with anyio.fail_after(1):
        refused = await stage.client(OPERATOR).ask(m.Release())
    assert refused.code == ErrorCode.UNAVAILABLE


HASH = "ab" * 32


def found(config_hash: str) -> dict[str, bytes]:
    return {"one": b"first", "other": b"second"} if config_hash == HASH else {}


def broken(_: str) -> dict[str, bytes]:
    raise OSError("the disk is gone")


def many(_: str) -> dict[str, bytes]:
    return {str(number): b"x" for number in range(m.MAX_WARMUP + 1)}


async def test_what_there_is_for_a_configuration_comes_whole_and_sealed(settings, make):
    before = open_descriptors()
    async with staged(settings, make(), warm={"tables": found}) as stage:
        client = stage.client()
        client.reads = True
        told = await client.ask(m.WarmupAsked(kind="tables", config_hash=HASH))
        assert told == m.WarmupTold(names=("one", "other"), sizes=(5, 6))
        assert client.contents == [b"first", b"second"]
        assert isinstance(await client.ask(ATTACH), m.Granted)
        client.reads = False
        assert isinstance(await client.ask(m.WarmupAsked(kind="x", config_hash=HASH)), m.WarmupTold)
        client.leave()
        await stage.leases(0)
    assert open_descriptors() <= before + 4


@pytest.mark.parametrize(
    ("kind", "config_hash"),
    [
        ("tables", "cd" * 32),
        ("unknown", HASH),
        ("broken", HASH),
        ("many", HASH),
        ("tables", "../../etc"),
        ("tables", ""),
    ],
)
async def test_what_is_not_there_is_told_as_nothing(settings, make, kind, config_hash):
    warm = {"tables": found, "broken": broken, "many": many}
    async with staged(settings, make(), warm=warm) as stage:
        client = stage.client()
        asked = m.WarmupAsked(kind=kind, config_hash=config_hash)
        assert await client.ask(asked) == m.WarmupTold()
        assert (await client.ask(m.Status())).state is State.SERVING


async def test_a_disk_that_hangs_keeps_nobody_waiting_for_long(settings, make, monkeypatch, caplog):
    monkeypatch.setattr(session, "_FIND_S", 0.1)
    answers = threading.Event()

    def hangs(_: str) -> dict[str, bytes]:
        answers.wait(30)
        return {}

    async with staged(settings, make(), warm={"bundles": hangs, "tables": found}) as stage:
        client = stage.client()
        with anyio.fail_after(5):
            for _ in range(MOST + 2):
                asked = m.WarmupAsked(kind="bundles", config_hash=HASH)
                assert await client.ask(asked) == m.WarmupTold()
            told = await client.ask(m.WarmupAsked(kind="tables", config_hash=HASH))
        assert told.sizes == (5, 6)
    answers.set()
    assert "no bundles are handed over: not found within 0.1 s" in caplog.text
