"""Many clients at once, bad ones among them, dead ones, and too few descriptors for all."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Deadlines
from preloadd.errors import AttachError, ErrorCode, Unavailable
from preloadd.linux import seqpacket
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from tests.checkout import ROOT
from tests.checkpoints import stored
from tests.leases import content
from tests.manager import Manager
from tests.waiting import eventually

MANY = 30


def attach_all(manager: Manager, number: int) -> list:
    """So many engines that attach at the same moment."""
    together = threading.Barrier(number)

    def one(_: int):
        together.wait()
        return manager.attach(parked=False)

    with ThreadPoolExecutor(number) as engines:
        return list(engines.map(one, range(number)))


def test_many_engines_attach_at_once(shared):
    files = stored(Path(shared.settings.model.path))
    leases = attach_all(shared, MANY)
    assert shared.status().lease_count == MANY
    shared.until(lambda: len(shared.leases) == MANY, "parked leases")
    assert all(content(lease) == files for lease in leases)
    for lease in leases:
        lease.close()
    shared.rests()
    assert shared.status().lease_count == 0


# -- bad clients --

STATUS = codec.encode(m.Status())


def silent(sock) -> None:
    """Says nothing."""


def deaf(sock) -> None:
    """Asks as long as it can, and reads no answer."""
    sock.settimeout(0)
    try:
        while True:
            sock.send(STATUS)
    except (BlockingIOError, ConnectionError):
        pass


def lying(sock) -> None:
    """Sends descriptors that no request carries."""
    seqpacket.send(sock, STATUS, [0, 1, 2])


def babbling(sock) -> None:
    sock.send(b"\x01\xc1garbage")


def foreign(sock) -> None:
    sock.send(bytes([7]) + STATUS[1:])


def truncating(sock) -> None:
    """Sends a packet that no buffer of the daemon takes whole."""
    sock.send(STATUS + b"\0" * (70 << 10))


def said(sock) -> list[m.Reply]:
    """All that the daemon answers until it hangs up."""
    sock.settimeout(10)
    told = []
    while True:
        try:
            packet = sock.recv(1 << 16)
        except ConnectionResetError:
            continue
        if not packet:
            return told
        told.append(codec.decode_reply(packet))


@pytest.fixture
def strict(manage, model) -> Manager:
    """A rank that waits for nobody longer than half a second."""
    made = manage(model, rank={"deadlines": Deadlines(speak=0.5, send=0.5)})
    made.start()
    made.ready()
    return made


def test_bad_clients_cost_others_nothing(strict, model):
    bad = [silent, deaf, lying, babbling, foreign, truncating]
    with ExitStack() as undo:
        socks = {kind: undo.enter_context(seqpacket.connect(strict.socket)) for kind in bad}
        for kind, sock in socks.items():
            kind(sock)
        since = time.monotonic()
        leases = attach_all(strict, MANY)
        assert time.monotonic() - since < 3
        assert content(leases[0]) == stored(model)
        complaint = "did not read for 0.5 s: hung up on"
        eventually(lambda: complaint in strict.log, lambda: complaint)
        ends = {kind: said(sock) for kind, sock in socks.items()}
    for kind, why in {
        silent: "no request came in time",
        lying: "no request carries descriptors",
        babbling: "the packet is not a request",
        foreign: "the packet is of protocol version 7, this side speaks version 1",
        truncating: "a packet of more than 65536 bytes",
    }.items():
        (refused,) = [reply for reply in ends[kind] if isinstance(reply, m.Refused)]
        assert (refused.code, why in refused.detail) == (ErrorCode.PROTOCOL, True), refused
        assert f"was hung up on: {why}" in strict.log
    assert all(isinstance(reply, m.StatusTold) for reply in ends[deaf])
    assert strict.log.count("hung up on") == len(bad)
    assert "Traceback" not in strict.log
    for lease in leases:
        lease.close()
    strict.rests()
    assert strict.status().lease_count == 0


def test_a_lease_that_breaks_the_protocol_ends(shared):
    with seqpacket.connect(shared.socket) as sock:
        sock.settimeout(10)
        sock.send(codec.encode(m.Attach(key=shared.status().key, device="CPU-0")))
        granted = seqpacket.receive(sock, 1 << 16)
        granted.close()
        assert shared.status().lease_count == 1
        sock.send(codec.encode(m.Watch()))
        (refused,) = said(sock)
    assert refused.code == ErrorCode.PROTOCOL
    assert refused.detail == "watch on a connection that is a lease: open another one"
    eventually(lambda: shared.status().lease_count == 0, lambda: "end of the lease")
    shared.until(lambda: not shared.leases, "end of the parked lease")


def test_more_clients_than_allowed_are_turned_away_and_come_in_later(manage, model):
    manager: Manager = manage(model, rank={"max_connections": 3})
    manager.start()
    manager.ready()
    clients = [manager.client() for _ in range(3)]
    for client in clients:
        assert isinstance(client.call(m.Status(), timeout=10).reply, m.StatusTold)
    with pytest.raises(Unavailable, match="3 clients are connected already") as busy:
        manager.attach(parked=False)
    assert busy.value.reason == m.Reason.BUSY
    for client in clients:
        client.close()
    eventually(lambda: manager.descriptors < 40 and answered(manager), lambda: "room again")
    manager.attach().close()


def answered(manager: Manager) -> bool:
    return isinstance(manager.ask(m.Status()), m.StatusTold)


# -- dying engines --

DYING = """
import os, signal, sys
from pathlib import Path
from preloadd.linux import seqpacket
from preloadd.protocol import codec
from preloadd.protocol import messages as m

path, cycles, received = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "received"
with seqpacket.connect(path) as sock:
    sock.send(codec.encode(m.Status()))
    key = codec.decode_reply(sock.recv(1 << 16)).key
attach = codec.encode(m.Attach(key=key, device="CPU-0", client="dying"))
for _ in range(cycles):
    pid = os.fork()
    if not pid:
        sock = seqpacket.connect(path)
        sock.send(attach)
        if received:
            assert len(seqpacket.receive(sock, 1 << 16).fds) > 1
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
"""


@pytest.mark.parametrize("moment", ["asked", "received"])
def test_engines_that_are_killed_leave_nothing(shared, moment):
    subprocess.run(
        [sys.executable, "-c", DYING, str(shared.socket), "50", moment],
        check=True,
        timeout=20,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    shared.rests()
    assert shared.status().lease_count == 0
    shared.until(lambda: not shared.leases, "an empty store")
    assert "Traceback" not in shared.log


# -- too few descriptors --


@contextmanager
def limited(manager: Manager, more: int):
    """In this block the rank may open so many descriptors more."""
    fds = [int(fd.name) for fd in Path(f"/proc/{manager.pid}/fd").iterdir()]
    before = resource.prlimit(manager.pid, resource.RLIMIT_NOFILE)
    assert max(fds) < len(fds) + 3
    resource.prlimit(manager.pid, resource.RLIMIT_NOFILE, (len(fds) + more, before[1]))
    yield
    resource.prlimit(manager.pid, resource.RLIMIT_NOFILE, before)


def test_a_rank_short_of_descriptors_says_so_and_loses_none(manager):
    outcomes = set()
    for more in range(2, len(manager.arena) + 3):
        with limited(manager, more):
            outcomes.add(attached(manager))
            assert manager.status().state is State.SERVING
        manager.rests()
        assert manager.status().lease_count == 0
    assert len(outcomes) == 2
    assert "attached" in outcomes
    (refused,) = outcomes - {"attached"}
    assert re.search(r"no-descriptors.*granting CPU-n.*raise the limit with `ulimit -n`", refused)
    assert "Traceback" not in manager.log
    manager.attach().close()


def attached(manager: Manager) -> str:
    try:
        manager.attach(parked=False).close()
    except AttachError as error:
        return re.sub(r"\d+", "n", str(error))
    return "attached"


def test_a_rank_short_of_descriptors_serves_those_it_can(manager):
    with ExitStack() as undo:
        with limited(manager, 2):
            clients = [undo.enter_context(manager.client()) for _ in range(4)]
            assert isinstance(clients[0].call(m.Status(), timeout=10).reply, m.StatusTold)
            complaint = "accepting a client: this process may have"
            eventually(lambda: complaint in manager.log, lambda: complaint)
            clients[0].close()
            clients[1].close()
            for client in clients[2:]:
                assert isinstance(client.call(m.Status(), timeout=10).reply, m.StatusTold)
    assert manager.log.count(complaint) == 1
    manager.rests()


@pytest.mark.parametrize("limit", [12, 14, 30, 48, 80])
def test_a_rank_that_starts_with_too_few_descriptors_says_so(manage, model, limit):
    manager: Manager = manage(model, chunk_bytes=1 << 14)
    manager.prelude = f"ulimit -n {limit};"
    manager.start()
    if limit == 80:
        manager.ready()
        manager.attach().close()
        return
    assert manager.ended() == 71
    assert re.search(
        rf"may have {limit} open files .*raise the limit with `ulimit -n`", manager.log
    )
    assert "Traceback" not in manager.log
    assert not manager.loaders()
