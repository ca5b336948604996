import errno
import logging
import os
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from preloadd.domain.leases import Lease, Mode
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.notify import Notifier
from preloadd.rank import parking
from preloadd.rank.parking import Parking
from tests.descriptors import open_descriptors
from tests.unit.rank.generations import ID

pytestmark = pytest.mark.anyio

LEASE = Lease("0b" * 8, ID, Mode.COPY, "engine", 7)


@asynccontextmanager
async def working(notifier):
    """A parking that does its work in the block."""
    made = Parking(notifier)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.work)
        yield made
        tasks.cancel_scope.cancel()


async def read_until(told, wanted, found=None):
    """What the manager was told, up to something with the verb `wanted`."""
    found = [] if found is None else found
    with anyio.fail_after(5):
        while wanted not in {verb for verb, _, _ in found}:
            found += told()
            await anyio.sleep(0.002)
    return found


async def test_a_generation_is_parked_chunks_first_and_its_manifest_last(notifier, told, make):
    found = []
    async with working(notifier) as it, anyio.create_task_group() as reading:
        reading.start_soon(read_until, told, "BARRIER", found)
        await it.commit(make())
    assert found == [
        ("FDSTORE", f"chunk.{ID}.0", 1),
        ("FDSTORE", f"chunk.{ID}.1", 1),
        ("FDSTORE", f"manifest.{ID}", 1),
        ("BARRIER", "", 1),
    ]


async def test_it_is_not_committed_before_the_manager_has_it_all(notifier, told, make):
    async with working(notifier) as it:
        with anyio.move_on_after(0.1) as waiting:
            await it.commit(make())
        assert waiting.cancelled_caught


async def test_what_is_parked_are_the_chunks_themselves(notifier, manager, make):
    generation = make()
    async with working(notifier) as it, anyio.create_task_group() as tasks:
        tasks.start_soon(it.commit, generation)
        messages = []
        with anyio.fail_after(5):
            while len(messages) < 4:
                await anyio.wait_readable(manager)
                messages.append(manager.receive())
        for message, fd in zip(messages, [*generation.chunks, generation.sealed], strict=False):
            assert message.fields["FDPOLL"] == "0"
            assert os.fstat(message.fds[0].fileno()).st_ino == os.fstat(fd.fileno()).st_ino
        for message in messages:
            message.close()


async def test_a_generation_is_evicted_manifest_first(notifier, told, make):
    async with working(notifier) as it:
        it.evict(make())
        await it.ready()
    assert told() == [
        ("FDSTOREREMOVE", f"manifest.{ID}", 0),
        ("FDSTOREREMOVE", f"chunk.{ID}.0", 0),
        ("FDSTOREREMOVE", f"chunk.{ID}.1", 0),
        ("READY", "", 0),
    ]


async def test_leases_are_polled_and_the_listener_is_not(notifier, manager):
    ours, theirs = seqpacket.pair()
    with ours, theirs:
        async with working(notifier) as it:
            it.keep_lease(LEASE, ours.fileno())
            it.keep_listener(theirs.fileno())
            await it.ready()
            it.drop_lease(LEASE)
            await it.ready()
    messages = [manager.receive() for _ in range(5)]
    assert [message.fields for message in messages] == [
        {"FDSTORE": "1", "FDNAME": LEASE.fdname},
        {"FDSTORE": "1", "FDNAME": "listen", "FDPOLL": "0"},
        {"READY": "1"},
        {"FDSTOREREMOVE": "1", "FDNAME": LEASE.fdname},
        {"READY": "1"},
    ]
    for message in messages:
        message.close()


async def test_what_is_parked_may_be_closed_before_its_turn_comes(notifier, manager):
    ours, theirs = seqpacket.pair()
    it = Parking(notifier)
    with theirs:
        with ours:
            it.keep_listener(ours.fileno())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.work)
            await it.ready()
            tasks.cancel_scope.cancel()
        message = manager.receive()
        theirs.send(b"still open")
        with seqpacket.adopted(message.fds[0]) as kept:
            assert kept.recv(100) == b"still open"
    assert manager.receive().fields == {"READY": "1"}


async def test_a_manager_that_hangs_keeps_nobody_waiting_who_only_tells(notifier, told):
    ours, theirs = seqpacket.pair()
    with ours, theirs:
        async with working(notifier) as it:
            for _ in range(50):  # more than a socket's queue takes
                it.keep_listener(ours.fileno())
            await anyio.sleep(0.05)
            found = []
            async with anyio.create_task_group() as reading:
                reading.start_soon(read_until, told, "READY", found)
                await it.ready()
    assert found == [*[("FDSTORE", "listen", 1)] * 50, ("READY", "", 0)]


async def test_leases_that_come_and_go_use_up_nothing_while_a_manager_hangs(notifier, told):
    ours, theirs = seqpacket.pair()
    with ours, theirs:
        async with working(notifier) as it:
            before = open_descriptors()
            for _ in range(100):
                it.keep_lease(LEASE, ours.fileno())
                it.drop_lease(LEASE)
                await anyio.lowlevel.checkpoint()
            assert open_descriptors() < before + 5
            async with anyio.create_task_group() as reading:
                reading.start_soon(read_until, told, "READY")
                await it.ready()


async def test_no_more_leases_are_parked_than_a_hanging_manager_may_owe(
    notifier, monkeypatch, caplog, told
):
    monkeypatch.setattr(parking, "MOST_WAITING", 3)
    caplog.set_level(logging.INFO)
    ours, theirs = seqpacket.pair()
    with ours, theirs:
        async with working(notifier) as it:
            for _ in range(2):
                for _ in range(5):
                    it.keep_lease(LEASE, ours.fileno())
                it.mark_profiling(LEASE.id, 1.5)
                await it.ready()
    assert told() == [*[("FDSTORE", LEASE.fdname, 1)] * 3, ("READY", "", 0)] * 2
    behind, caught_up = caplog.messages  # of both times: they lie close together
    assert "neither new leases nor marks" in behind
    assert "will outlive this daemon" in behind
    assert "has caught up" in caught_up


async def test_a_manager_that_fails_is_told_of_once_and_again_when_it_listens(
    notifier, told, monkeypatch, caplog
):
    monkeypatch.setattr(parking, "BARRIER_S", 0.02)
    caplog.set_level(logging.INFO)
    async with working(notifier) as it:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await it.settle()
        await it.ready()
        await it.ready()
    failing, listens = caplog.messages
    assert "could not be told what to keep" in failing
    assert "is told again what to keep" in listens


async def test_what_is_called_off_at_the_end_leaves_no_descriptor(notifier):
    made, before = Parking(notifier), open_descriptors()
    for _ in range(2):
        made.keep_listener(2)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await made.work()
    assert open_descriptors() == before


async def test_one_more_descriptor_is_kept_before_it_goes_on(notifier, told):
    async with working(notifier) as made, anyio.create_task_group() as tasks:
        tasks.start_soon(made.keep, "device", 2)
        found = await read_until(told, "BARRIER")
    assert found == [("FDSTORE", "device", 1), ("BARRIER", "", 1)]


async def test_a_release_is_marked_for_the_next_life(notifier, told):
    async with working(notifier) as it:
        it.mark_released()
        await it.ready()
    assert told() == [("FDSTORE", "released", 1), ("READY", "", 0)]


async def test_a_manager_that_does_not_answer_in_time_is_an_error(notifier, monkeypatch, caplog):
    monkeypatch.setattr(parking, "BARRIER_S", 0.05)
    async with working(notifier) as it:
        with pytest.raises(TimeoutError, match="did not answer in"):
            await it.settle()
        assert "could not be told what to keep" in caplog.text
        await it.ready()  # the next order is carried out all the same


async def test_a_manager_that_is_gone_is_an_error(notifier, manager, make, caplog):
    manager.close()
    async with working(notifier) as it:
        with pytest.raises(OSError, match=r"refused|not connected"):
            await it.commit(make())
    assert "could not be told what to keep" in caplog.text


async def test_without_a_manager_everything_is_done_at_once(make):
    async with working(Notifier({})) as it:
        await it.commit(make())
        it.evict(make())
        await it.ready()


async def test_leases_that_cannot_be_parked_are_none_the_less_granted(notifier, told, caplog):
    async with working(notifier) as it:
        for _ in range(3):
            it.keep_lease(LEASE, _closed())
        await it.ready()
    assert told() == [("READY", "", 0)]
    assert len(caplog.records) == 1
    assert "the lease of engine will not outlive this daemon" in caplog.text
    assert os.strerror(errno.EBADF) in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def _closed() -> int:
    fd = os.dup(2)
    os.close(fd)
    return fd


async def test_that_a_lease_profiles_is_marked_until_when(notifier, manager):
    async with working(notifier) as it:
        it.mark_profiling(LEASE.id, 12.5)
        await it.ready()
    message = manager.receive()
    assert (message.fields["FDNAME"], message.fields["FDPOLL"]) == (f"profiling.{LEASE.id}", "0")
    assert parking.parked_profiling(message.name, message.fds[0]) == (LEASE.id, 12.5)
    assert message.fds[0].closed


@pytest.mark.parametrize(
    ("name", "content"),
    [("profiling.x", b"1.5"), ("profiling." + "0b" * 8, b"soon"), ("profiling." + "0b" * 8, None)],
)
def test_a_foreign_mark_is_none(name, content):
    fd = sealed_bytes("x", content) if content is not None else OwnedFd.copy_of(0)
    with pytest.raises(ValueError, match=r"no lease id|could not convert|else than a memfd"):
        parking.parked_profiling(name, fd)
    assert fd.closed


async def test_marks_that_come_and_go_use_up_nothing_while_a_manager_hangs(
    notifier, told, monkeypatch, caplog
):
    monkeypatch.setattr(parking, "MOST_WAITING", 3)
    async with working(notifier) as it:
        before = open_descriptors()
        for _ in range(100):
            it.mark_profiling(LEASE.id, 1.5)
            it.drop_profiling(LEASE.id)
        assert open_descriptors() < before + 5
        assert "behind" in caplog.text
        async with anyio.create_task_group() as reading:
            reading.start_soon(read_until, told, "READY")
            await it.told()
            await it.ready()


async def test_without_descriptors_a_mark_is_not_parked(notifier, told, descriptors_left, caplog):
    async with working(notifier) as it:
        with descriptors_left(0):
            it.mark_profiling(LEASE.id, 1.5)
        await it.ready()
    assert told() == [("READY", "", 0)]
    assert f"profiling.{LEASE.id} is not parked" in caplog.text
