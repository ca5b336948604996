"""A daemon's whole life in this process. Everything but the loader is real; nothing is loaded
unless a test says so. Lives of daemons in processes of their own are in tests/process."""

import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from preloadd.domain.access import Policy
from preloadd.domain.devices import Device, Probe
from preloadd.domain.leases import Lease, Mode
from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Memory
from preloadd.errors import LoaderFailed
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.notify import Notifier
from preloadd.memory.host import HostKeeper
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.rank.daemon import Daemon
from preloadd.rank.device import PARKED, Gpu
from preloadd.rank.loading import Loader
from preloadd.rank.warmup.tables import RECORD, Tables
from preloadd.rank.warmup.warmup import WarmUp
from preloadd.transport.status import ask_status
from tests.checkpoints import llama
from tests.listening import listen
from tests.unit.rank.generations import ID

pytestmark = pytest.mark.anyio

LEASE = Lease("0b" * 8, ID, Mode.COPY, "engine", os.getpid())
LISTEN = ("FDSTORE", "listen", 1)


@pytest.fixture
def path(settings) -> Path:
    """Where the daemon listens; its folder is there, as the lock's taker has seen to."""
    folder = Path(settings.socket_dir, settings.instance)
    folder.mkdir(mode=0o700)
    return folder / "rank.sock"


@pytest.fixture
def daemon(settings, path):
    def daemon(notifier, *, argv=("/nonexistent",), watchdog_s=None, kept=None, gpu=None) -> Daemon:
        return Daemon(
            settings,
            Policy(owner=os.geteuid()),
            notifier,
            Loader(argv, os.environ, HostKeeper()),
            clock=anyio.current_time,
            watchdog_s=watchdog_s,
            count=lambda: kept,
            warm_up=WarmUp(settings, Tables(path.with_name(RECORD))),
            gpu=gpu,
        )

    return daemon


class Life:
    """One life, from its start until it is told to stop; its manager reads all the while."""

    def __init__(self, path: Path, told) -> None:
        self.said: list[tuple[str, str, int]] = []
        self._path = path
        self._told = told

    async def until(self, *wanted: str) -> None:
        """Wait until the daemon has said all of that."""
        with anyio.fail_after(10):
            while not set(wanted) <= {verb for verb, _, _ in self.said}:  # noqa: ASYNC110
                await anyio.sleep(0.002)

    async def status(self):
        return await anyio.to_thread.run_sync(lambda: ask_status(self._path, timeout=5))

    async def read(self) -> None:
        while True:
            self.said += self._told()
            await anyio.sleep(0.002)


@asynccontextmanager
async def living(daemon: Daemon, parked, path: Path, told, *, number=signal.SIGTERM):
    """A life that has become ready; it ends by a signal at the end of the block."""
    life = Life(path, told)
    async with anyio.create_task_group() as helpers:
        helpers.start_soon(life.read)
        async with anyio.create_task_group() as lives:
            lives.start_soon(daemon.run, parked)
            await life.until("READY")
            yield life
            os.kill(os.getpid(), number)
        life.said += told()
        helpers.cancel_scope.cancel()


async def test_it_adopts_parks_its_listener_is_ready_and_serves(
    daemon, notifier, make, parked, path, told
):
    async with living(daemon(notifier), parked(make()), path, told) as life:
        status = await life.status()
        assert (status.state, status.adopted, status.generation) == (State.SERVING, True, ID)
    assert life.said == [
        ("STATUS", "serving tests/model (adopted)", 0),
        LISTEN,
        ("READY", "", 0),
        ("STOPPING", "", 0),
    ]
    assert path.is_socket()  # it is parked, and would be served again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_either_signal_ends_it(daemon, notifier, make, parked, path, told, number):
    async with living(daemon(notifier), parked(make()), path, told, number=number):
        pass


async def test_without_a_manager_no_socket_stays_behind(daemon, make, parked, path):
    async with anyio.create_task_group() as lives:
        lives.start_soon(daemon(Notifier({})).run, parked(make()))
        with anyio.fail_after(5):
            while not path.is_socket():  # noqa: ASYNC110
                await anyio.sleep(0.002)
        await anyio.to_thread.run_sync(lambda: ask_status(path, timeout=5))
        os.kill(os.getpid(), signal.SIGTERM)
    assert not path.exists()


async def test_it_shows_that_it_lives(daemon, notifier, make, parked, path, told):
    started = daemon(notifier, watchdog_s=0.01)
    async with living(started, parked(make()), path, told) as life:
        await life.until("WATCHDOG")
        before = life.said.count(("WATCHDOG", "", 0))
        with anyio.fail_after(5):
            while life.said.count(("WATCHDOG", "", 0)) < before + 3:  # noqa: ASYNC110
                await anyio.sleep(0.002)


# -- what an earlier life left --


def listening(path: Path) -> OwnedFd:
    return OwnedFd(listen(path, 0o600, 8).detach())


async def test_a_parked_listener_is_used_as_it_is(daemon, notifier, make, parked, path, told):
    every = parked(make()) | {"listen": [listening(path)]}
    path.chmod(0o666)
    before = path.stat().st_ino
    async with living(daemon(notifier), every, path, told) as life:
        assert (await life.status()).state is State.SERVING
        assert (path.stat().st_ino, path.stat().st_mode & 0o777) == (before, 0o600)
    assert LISTEN not in life.said


def elsewhere(path: Path) -> OwnedFd:
    listening(path).close()
    return listening(path.parents[1] / "another.sock")


def without_path(path: Path) -> OwnedFd:
    fd = listening(path)
    path.unlink()
    return fd


def no_socket(path: Path) -> OwnedFd:
    return sealed_bytes("x", b"x")


def no_listener(path: Path) -> OwnedFd:
    listen(path, 0o600, 1).close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        return OwnedFd(sock.detach())


def another_kind(path: Path) -> OwnedFd:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        sock.listen()
        return OwnedFd(sock.detach())


@pytest.mark.parametrize("left", [elsewhere, without_path, no_socket, no_listener, another_kind])
async def test_a_listener_that_nobody_can_reach_is_replaced(
    daemon, notifier, make, parked, path, told, left
):
    every = parked(make()) | {"listen": [left(path)]}
    async with living(daemon(notifier), every, path, told) as life:
        assert (await life.status()).state is State.SERVING
    assert life.said.index(("FDSTOREREMOVE", "listen", 0)) < life.said.index(LISTEN)


async def test_parked_leases_go_on_and_end_with_their_engines(
    daemon, notifier, make, parked, path, told
):
    ours, theirs = seqpacket.pair()
    every = parked(make()) | {LEASE.fdname: [OwnedFd(ours.detach())]}
    with theirs:
        async with living(daemon(notifier), every, path, told) as life:
            (lease,) = (await life.status()).leases
            assert (lease.id, lease.client, lease.pid) == (LEASE.id, "engine", os.getpid())
            theirs.close()
            await life.until("FDSTOREREMOVE")
            assert (await life.status()).lease_count == 0
    assert ("FDSTOREREMOVE", LEASE.fdname, 0) in life.said


async def test_what_is_no_lease_is_dropped_alone(daemon, notifier, make, parked, path, told):
    ours, theirs = seqpacket.pair()
    junk = {
        LEASE.fdname: [sealed_bytes("x", b"x")],
        "lease.": [OwnedFd(ours.detach())],
    }
    with theirs:
        async with living(daemon(notifier), parked(make()) | junk, path, told) as life:
            assert (await life.status()).lease_count == 0
        assert not theirs.recv(10)
    dropped = {name for verb, name, _ in life.said if verb == "FDSTOREREMOVE"}
    assert dropped == set(junk)


@pytest.mark.parametrize("listens", [False, True])
async def test_a_connection_without_an_engine_is_no_lease(
    daemon, notifier, make, parked, path, told, caplog, listens
):
    lost = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if listens:
        lost.bind(os.fspath(path.with_name("lost")))
        lost.listen()
    every = parked(make()) | {LEASE.fdname: [OwnedFd(lost.detach())]}
    async with living(daemon(notifier), every, path, told) as life:
        assert (await life.status()).lease_count == 0
    dropped = {name for verb, name, _ in life.said if verb == "FDSTOREREMOVE"}
    assert dropped == {LEASE.fdname}
    assert f"what was parked as {LEASE.fdname} is no lease: a socket without a peer" in caplog.text


async def test_what_was_released_stays_so(daemon, notifier, path, told):
    mark = {"released": [sealed_bytes("x", b"")]}
    async with living(daemon(notifier), mark, path, told) as life:
        assert (await life.status()).state is State.RELEASED
    assert not [name for verb, name, _ in life.said if verb == "FDSTOREREMOVE"]


async def test_a_release_that_was_not_carried_out_is_forgotten(
    daemon, notifier, make, parked, path, told
):
    every = parked(make()) | {"released": [sealed_bytes("x", b"")]}
    async with living(daemon(notifier), every, path, told) as life:
        assert (await life.status()).state is State.SERVING
    assert ("FDSTOREREMOVE", "released", 0) in life.said


# -- loads --

FAILING = [sys.executable, "-c", "raise SystemExit(3)"]


async def failure(daemon: Daemon, told, parked=None) -> tuple[BaseException, list]:
    """What keeps the daemon from serving, and what it said until then."""
    life = Life(Path(), told)
    async with anyio.create_task_group() as helpers:
        helpers.start_soon(life.read)
        try:
            with anyio.fail_after(10):
                await daemon.run(parked or {})
        except BaseExceptionGroup as group:
            (cause,) = group.exceptions
        helpers.cancel_scope.cancel()
    return cause, life.said + told()


async def test_a_load_that_fails_ends_it_with_the_loaders_status(daemon, notifier, told, path):
    cause, _ = await failure(daemon(notifier, argv=FAILING), told)
    assert isinstance(cause, LoaderFailed)
    assert cause.exit_status == 3
    assert not path.exists()


@pytest.fixture
def for_others(make, parked, recipe):
    """A parked generation that other settings made."""
    other = replace(recipe, fields=recipe.fields | {"revision": "v2"})
    return parked(make(wanted=other))


READY = [
    sys.executable,
    "-c",
    """
import os, socket
from preloadd.linux.passed import inherited
from preloadd.protocol import codec, messages as m
from preloadd.transport.blocking import Link
(fd,) = inherited(os.environ, os.getpid())["link"]
link = Link(socket.socket(fileno=fd.take()))
order = codec.decode_order(link.receive().data)
link.send(codec.encode(m.Identified(key={})))
codec.decode_proceed(link.receive().data)
raise SystemExit(100 + (order.frees or 0) // 4096)
""",
]
"""A loader that finds nothing in its way, and ends with 100 and a page more for each that it frees,
once it may go on."""


async def test_weights_that_do_not_fit_are_gone_before_others_are_loaded(
    daemon, notifier, told, for_others, settings, tmp_path
):
    llama(tmp_path / "model")
    cause, said = await failure(daemon(notifier, argv=READY), told, for_others)
    assert cause.exit_status == 103
    followed = [(verb, name) for verb, name, _ in said if verb in {"FDSTOREREMOVE", "BARRIER"}]
    assert {name for _, name in followed[:3]} == {
        f"manifest.{ID}",
        f"chunk.{ID}.0",
        f"chunk.{ID}.1",
    }
    assert followed[3:] == [("BARRIER", "")]


async def test_weights_stay_parked_until_a_loader_finds_nothing_in_its_way(
    daemon, notifier, told, for_others, settings, tmp_path
):
    llama(tmp_path / "model")
    cause, said = await failure(daemon(notifier, argv=FAILING), told, for_others)
    assert cause.exit_status == 3
    assert f"see whether {sys.executable} works" in str(cause)
    assert not [verb for verb, _, _ in said if verb == "FDSTOREREMOVE"]


async def test_what_an_engine_holds_is_not_counted_as_freed(
    daemon, notifier, told, for_others, settings, tmp_path
):
    llama(tmp_path / "model")
    ours, theirs = seqpacket.pair()
    with theirs:
        engine = {LEASE.fdname: [OwnedFd(ours.detach())]}
        cause, _ = await failure(daemon(notifier, argv=READY), told, for_others | engine)
    assert cause.exit_status == 100


async def test_weights_of_changed_files_are_served_where_nothing_replaces_them(
    daemon, notifier, make, parked, path, told, recipe, settings, tmp_path
):
    llama(tmp_path / "model")
    every = parked(make(wanted=replace(recipe, model=settings.model.path)))
    async with living(daemon(notifier, argv=FAILING), every, path, told) as life:
        status = await life.status()
        assert (status.state, status.adopted, status.generation) == (State.SERVING, True, ID)
        assert "the weights of before stay until it is mended and the rank res" in status.detail
        assert "(preloadctl restart): the loader " in status.detail
    assert not [verb for verb, _, _ in life.said if verb == "FDSTOREREMOVE"]


async def test_what_was_released_is_not_kept_because_it_is_outdated(
    daemon, notifier, told, path, for_others, tmp_path
):
    llama(tmp_path / "model")
    every = for_others | {"released": [sealed_bytes("x", b"")]}
    async with living(daemon(notifier), every, path, told) as life:
        assert (await life.status()).state is State.RELEASED
        await life.until("FDSTOREREMOVE")


def profiling(until: float) -> dict[str, list[OwnedFd]]:
    """What is parked of a lease that profiles, without its connection."""
    return {f"profiling.{LEASE.id}": [sealed_bytes("x", str(until).encode())]}


async def test_weights_that_do_not_fit_are_not_gone_while_an_engine_profiles(
    daemon, notifier, told, for_others, settings, tmp_path
):
    llama(tmp_path / "model")
    ours, theirs = seqpacket.pair()
    engine = {LEASE.fdname: [OwnedFd(ours.detach())], **profiling(anyio.current_time() + 60)}
    life = Life(Path(), told)
    with theirs, pytest.raises(BaseExceptionGroup):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(life.read)
            tasks.start_soon(daemon(notifier, argv=READY).run, for_others | engine)
            await life.until("?", "STATUS")  # "?": asks for more time
            await anyio.sleep(0.05)
            assert not [name for verb, name, _ in life.said if verb == "FDSTOREREMOVE"]
            theirs.send(codec.encode(m.Profiling(active=False)))
            await life.until("BARRIER")
    dropped = [name for verb, name, _ in life.said if verb == "FDSTOREREMOVE"]
    assert dropped[0] == f"profiling.{LEASE.id}"
    assert f"manifest.{ID}" in dropped


async def test_a_mark_without_its_lease_is_dropped_and_holds_up_nothing(
    daemon, notifier, make, parked, path, told
):
    junk = {"profiling.x": [sealed_bytes("x", b"1.5")]}
    every = parked(make()) | profiling(anyio.current_time() + 60) | junk
    async with living(daemon(notifier), every, path, told) as life:
        assert (await life.status()).state is State.SERVING
    dropped = {name for verb, name, _ in life.said if verb == "FDSTOREREMOVE"}
    assert dropped == {f"profiling.{LEASE.id}", "profiling.x"}


async def test_weights_that_do_not_fit_stay_parked_where_nothing_can_be_loaded(
    daemon, notifier, told, for_others
):
    cause, said = await failure(daemon(notifier), told, for_others)
    assert "no such folder" in str(cause)
    assert not [verb for verb, _, _ in said if verb == "FDSTOREREMOVE"]


# -- its GPU --


class Asked:
    """Tells of a GPU whose persistence mode is off, once it may; `times` it was asked."""

    def __init__(self) -> None:
        self.times = 0
        self.may_answer = anyio.Event()

    async def __call__(self) -> Probe:
        self.times += 1
        await self.may_answer.wait()
        return Probe((Device("CPU-0", "x", minor=2, persistence=False),))


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def gpu(asked, tmp_path) -> Gpu:
    (tmp_path / "nvidia2").symlink_to("/dev/null")
    return Gpu("CPU-0", Memory.CUDA, asked, nodes=tmp_path)


async def test_its_gpu_is_looked_after_once_it_serves_what_was_parked(
    daemon, notifier, make, parked, path, told, gpu, asked
):
    async with living(daemon(notifier, gpu=gpu), parked(make()), path, told) as life:
        assert (await life.status()).detail == ""
        asked.may_answer.set()
        with anyio.fail_after(5):
            while not (detail := (await life.status()).detail):  # noqa: ASYNC110
                await anyio.sleep(0.002)
        assert "persistence mode was off" in detail
    assert asked.times == 1
    assert life.said.index(("READY", "", 0)) < life.said.index(("FDSTORE", PARKED, 1))
    assert gpu.parked == 1


async def test_a_driver_that_hangs_holds_up_nothing(
    daemon, notifier, make, parked, path, told, gpu, asked
):
    async with living(daemon(notifier, gpu=gpu), parked(make()), path, told) as life:
        assert (await life.status()).state is State.SERVING


async def test_it_asks_while_it_loads(daemon, notifier, told, gpu, settings, tmp_path):
    llama(tmp_path / "model")
    asked = gpu._ask
    started = daemon(notifier, argv=FAILING, gpu=gpu)
    await failure(started, told)
    assert asked.times <= 1


async def test_a_parked_node_stays_with_it_and_is_closed_where_there_is_no_gpu(
    daemon, notifier, make, parked, path, told, gpu
):
    def left():
        return parked(make()) | {PARKED: [OwnedFd(os.open("/dev/null", os.O_RDWR))]}

    async with living(daemon(notifier, gpu=gpu), left(), path, told) as life:
        assert gpu.parked == 1
    assert ("FDSTOREREMOVE", PARKED, 0) not in life.said
    path.unlink()
    every = left()
    async with living(daemon(notifier), every, path, told) as life:
        pass
    assert ("FDSTOREREMOVE", PARKED, 0) in life.said
    assert every.get(PARKED) is None


async def test_what_the_manager_keeps_is_counted_with_the_node(daemon, gpu, notifier):
    started = daemon(notifier, kept=3, gpu=gpu)
    await started._require_kept(3)
    assert started._service.status().detail == ""
    gpu.resume([OwnedFd(os.open("/dev/null", os.O_RDWR))])
    await started._require_kept(3)
    assert "systemd keeps 3 of 4 descriptors" in started._service.status().detail
    gpu.close()
