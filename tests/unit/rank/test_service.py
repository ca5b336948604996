import dataclasses
import os

import anyio
import pytest

from preloadd.domain.leases import Lease, Mode
from preloadd.domain.lifecycle import State
from preloadd.errors import ErrorCode
from preloadd.linux import seqpacket
from preloadd.protocol import messages as m
from preloadd.rank.parking import Parking
from preloadd.rank.service import Service
from tests.descriptors import open_descriptors
from tests.unit.rank.generations import FILES, ID, KEY, PAGE

pytestmark = pytest.mark.anyio

ATTACH = m.Attach(key=KEY, device="CPU-0", mode=Mode.COPY, client="an engine!")
NEXT = "0d" * 16


@pytest.fixture
async def parking(notifier):
    made = Parking(notifier)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.work)
        yield made
        await made.ready()  # so that every order has been carried out
        tasks.cancel_scope.cancel()


@pytest.fixture
def now():
    """What the clock shows, to be changed."""
    return [100.0]


@pytest.fixture
def service(settings, parking, now):
    made = Service(settings, parking, clock=lambda: now[0])
    yield made
    made.close()


@pytest.fixture
def serving(service, make):
    """A service that has adopted a generation."""
    service.adopted(make())
    return service


def granted(service: Service, request: m.Attach = ATTACH, pid: int = 7) -> Lease:
    """A lease, whose descriptors nobody needs."""
    lease, _, fds = service.attach(request, pid=pid)
    for fd in fds:
        fd.close()
    service.lease_began(lease, None)
    return lease


# -- attach --


async def test_an_engine_with_the_same_key_is_granted_copies_of_all(serving):
    lease, reply, fds = serving.attach(ATTACH, pid=7)
    generation = serving.generation
    assert (lease.generation, lease.mode, lease.client, lease.pid) == (
        ID,
        Mode.COPY,
        "an_engine_",
        7,
    )
    assert reply == m.Granted(
        generation=ID,
        lease=lease.id,
        backend="host",
        manifest=os.fstat(generation.sealed.fileno()).st_size,
        chunks=(PAGE, 2 * PAGE),
        profiling=True,
        warmup=True,
    )
    originals = (generation.sealed, *generation.chunks)
    assert [os.fstat(fd.fileno()).st_ino for fd in fds] == [
        os.fstat(fd.fileno()).st_ino for fd in originals
    ]
    for fd in fds:
        fd.close()
    assert serving.status().lease_count == 0  # it begins when the session says so


async def test_every_lease_has_an_id_of_its_own(serving):
    assert len({granted(serving).id for _ in range(5)}) == 5


async def test_equal_files_stand_for_equal_content(serving):
    unread = {**KEY, "checkpoint": ""}
    by_files = dataclasses.replace(FILES[0])
    request = m.Attach(key=unread, device="CPU-0", files=(by_files,))
    assert granted(serving, request)
    assert isinstance(serving.attach(m.Attach(key=unread, device="CPU-0"), pid=7), m.Mismatched)


async def test_a_mismatch_is_told_in_full_but_not_without_end(serving):
    many = {f"field{n:03}": "x" * 1000 for n in range(100)}
    found = serving.attach(m.Attach(key={**KEY, **many}, device="CPU-0"), pid=7)
    assert len(found.fields) == 64
    assert found.fields[0] == m.Field(name="field000", daemon="(absent)", engine="x" * 512)


async def test_another_device_is_all_that_is_told(serving):
    found = serving.attach(m.Attach(key={}, device="CPU-1"), pid=7)
    assert found.fields == (m.Field(name="device", daemon="CPU-0", engine="CPU-1"),)
    assert serving.memory(m.Memory(key={}, device="CPU-1")) == found


async def test_without_descriptors_nothing_is_granted_and_none_is_lost(serving, descriptors_left):
    with descriptors_left(2):
        before = open_descriptors()
        refused = serving.attach(ATTACH, pid=7)
        assert open_descriptors() == before
    assert refused.code == ErrorCode.NO_DESCRIPTORS
    assert "granting CPU-0: this process may have" in refused.detail


# -- states --


async def test_while_there_is_nothing_every_state_says_so(service, make):
    def unavailable() -> tuple[str, str, str, int, int]:
        told = service.attach(ATTACH, pid=7)
        assert told == service.memory(m.Memory(key=KEY, device="CPU-0"))
        return told.reason, told.detail, told.phase, told.done, told.total

    assert unavailable() == ("starting", "CPU-0 is starting", "", 0, 0)
    service.load_started()
    service.progressed(m.Progress(phase="storing", done=3, total=9))
    assert unavailable() == ("loading", "CPU-0 is loading", "storing", 3, 9)
    told = service.status()
    assert (told.phase, told.done, told.total) == ("storing", 3, 9)
    service.load_failed("the disk is gone")
    assert unavailable() == ("failed", "the disk is gone", "", 0, 0)
    service.load_started()
    assert unavailable() == ("loading", "CPU-0 is loading", "", 0, 0)
    service.loaded(make())
    assert service.release(None, operator=True) == m.Done()
    reason, detail, *_ = unavailable()
    assert (reason, "ask for a load" in detail) == ("released", True)
    service.load_started()
    assert unavailable()[1] == "CPU-0 is loading"
    service.stopping()
    assert unavailable()[0] == "stopping"


async def test_a_phase_is_told_for_as_long_as_it_is_of_a_load(service, make):
    service.load_started()
    service.close_gate()
    service.progressed(m.Progress(phase="storing", done=2, total=2))
    service.loaded(make())
    assert (service.status().state, service.status().phase) == (State.LOADING, "")
    service.progressed(m.Progress(phase="warming up: saying a token"))
    assert service.status().phase == "warming up: saying a token"
    service.open_gate()
    assert (service.status().state, service.status().phase) == (State.SERVING, "")


async def test_a_phase_without_end_does_not_fill_the_status(service):
    service.load_started()
    service.progressed(m.Progress(phase="waiting\n" * 9000))
    phase = service.status().phase
    assert (len(phase), phase.isprintable()) == (512, True)


async def test_watchers_wake_up_at_every_change(service, make):
    state, changed = service.changed()
    assert state == m.StateChanged(state=State.STARTING)
    service.progressed(m.Progress(phase="x"))
    assert not changed.is_set()
    service.adopted(make())
    assert changed.is_set()
    state, again = service.changed()
    assert state == m.StateChanged(state=State.SERVING, generation=ID, checkpoint="sampled-1:00ff")
    assert not again.is_set()


async def test_status_tells_what_this_life_did_and_what_the_generation_cost(service, make, now):
    assert service.status().counters == {"loads": 0, "bytes_read": 0, "warmup_ms": 0}
    now[0] += 2
    service.load_started()
    service.loaded(make())
    now[0] += 3
    told = service.status()
    assert (told.ready_s, told.uptime_s) == (2.0, 5.0)
    assert (told.group, told.instance, told.device, told.role) == (
        "tests",
        "CPU-0",
        "CPU-0",
        "target",
    )
    assert (told.model, told.backend, told.builder) == ("tests/model", "host", "native")
    assert (told.tensors, told.tensor_bytes, told.arena_bytes, told.chunks) == (
        2,
        2 * PAGE + 8,
        3 * PAGE,
        2,
    )
    assert told.counters == {
        "loads": 1,
        "bytes_read": 2 * PAGE + 8,
        "generation_bytes_read": 2 * PAGE + 8,
        "generation_files": 1,
        "generation_load_ms": 5,
        "warmup_ms": 0,
    }
    assert (told.adopted, told.generation, told.key) == (False, ID, KEY)
    assert told.pid == os.getpid()


async def test_an_adopted_generation_cost_this_life_nothing(serving):
    told = serving.status()
    assert told.adopted
    assert (told.counters["loads"], told.counters["bytes_read"]) == (0, 0)
    assert told.counters["generation_bytes_read"] == 2 * PAGE + 8


async def test_leases_are_told_up_to_a_number_and_counted_beyond(serving):
    leases = [granted(serving, pid=n) for n in range(130)]
    told = serving.status()
    assert (len(told.leases), told.lease_count) == (128, 130)
    assert told.leases[5] == m.LeaseTold(
        id=leases[5].id, client="an_engine_", pid=5, mode=Mode.COPY, generation=ID
    )


# -- leases --


async def test_a_lease_is_parked_when_it_begins_and_dropped_when_it_ends(serving, parking, told):
    ours, theirs = seqpacket.pair()
    lease, _, fds = serving.attach(ATTACH, pid=7)
    for fd in fds:
        fd.close()
    with ours, theirs:
        serving.lease_began(lease, ours.fileno())
        await parking.ready()
        assert told() == [("FDSTORE", lease.fdname, 1), ("READY", "", 0)]
    assert serving.lease(lease.id) == lease
    serving.lease_ended(lease)
    serving.lease_ended(lease)
    await parking.ready()
    assert told() == [("FDSTOREREMOVE", lease.fdname, 0), ("READY", "", 0)]
    assert serving.lease(lease.id) is None
    assert serving.lease(None) is None


async def test_a_lease_of_an_earlier_daemon_is_not_parked_again(serving, parking, told):
    serving.lease_began(Lease("0b" * 8, ID, Mode.COPY, "e", 7), None)
    await parking.ready()
    assert told() == [("READY", "", 0)]
    assert serving.status().lease_count == 1


# -- release and load --


async def test_a_release_drops_what_is_parked_and_what_is_held(serving, parking, told):
    generation = serving.generation
    assert serving.release(None, operator=True) == m.Done()
    assert all(fd.closed for fd in (generation.sealed, *generation.chunks))
    await parking.ready()
    dropped = [name for verb, name, _ in told() if verb == "FDSTOREREMOVE"]
    assert dropped == [f"manifest.{ID}", f"chunk.{ID}.0", f"chunk.{ID}.1"]
    assert (serving.state, serving.status().generation) == (State.RELEASED, "")


async def test_who_may_not_release_is_told_why(serving):
    refused = serving.release(None, operator=False)
    assert (refused.code, "sole lease holder" in refused.detail) == (ErrorCode.DENIED, True)
    one, two = granted(serving), granted(serving, pid=8)
    for asker in (None, one.id):
        refused = serving.release(asker, operator=True)
        assert refused.code == ErrorCode.DENIED
        assert "an_engine_ (pid 8)" in refused.detail
    serving.lease_ended(two)
    assert serving.release(one.id, operator=False) == m.Done()


async def test_leases_of_an_earlier_generation_do_not_count(service, make):
    old = Lease("0b" * 8, NEXT, Mode.COPY, "old", 7)
    service.lease_began(old, None)
    service.adopted(make())
    assert service.release(old.id, operator=False).code == ErrorCode.DENIED
    new = granted(service)
    assert service.release(new.id, operator=False) == m.Done()
    assert service.status().lease_count == 2


async def test_what_is_not_there_cannot_be_released(service):
    refused = service.release(None, operator=True)
    assert (refused.code, refused.detail) == (
        ErrorCode.UNAVAILABLE,
        "nothing to release: the rank is starting",
    )


async def test_a_load_may_be_asked_for_by_operators_when_there_is_nothing(serving):
    assert serving.load(operator=False).code == ErrorCode.DENIED
    assert serving.load(operator=True).detail == "nothing to load: the rank is serving"
    serving.release(None, operator=True)
    wanted = serving.load_wanted
    assert not wanted.is_set()
    assert serving.load(operator=True) == m.Done()
    assert wanted.is_set()
    serving.load_started()
    assert not serving.load_wanted.is_set()


# -- profiling --


def profilers(service: Service) -> list[str]:
    return [lease.id for lease in service.status().leases if lease.profiling]


async def test_who_profiles_is_told_until_it_ends_or_is_not_believed_any_more(serving, now):
    one, two = granted(serving), granted(serving, pid=8)
    assert serving.profiling(one, active=True) == m.Done()
    assert (profilers(serving), serving.profilers()) == ([one.id], [one])
    now[0] += 299
    assert serving.profiling(two, active=True) == m.Done()
    assert serving.profilers(two.id) == [one]
    now[0] += 1
    assert profilers(serving) == [two.id]
    assert serving.profiling(two, active=False) == m.Done()
    assert serving.profiling(two, active=False) == m.Done()
    assert (profilers(serving), serving.profilers()) == ([], [])


@pytest.mark.parametrize("ends", [True, False])
async def test_a_lease_is_spared_no_longer_in_all_however_often_it_profiles(serving, now, ends):
    one, other = granted(serving), granted(serving, pid=8)
    for _ in range(3):
        assert serving.profiling(one, active=True) == m.Done()
        assert profilers(serving) == [one.id]
        if ends:
            assert serving.profiling(one, active=False) == m.Done()
        now[0] += 100
    refused = serving.profiling(one, active=True)
    assert refused.code == ErrorCode.UNAVAILABLE
    assert "was spared for 300 s" in refused.detail
    assert (profilers(serving), serving.profilers()) == ([], [])
    assert serving.profiling(one, active=False) == m.Done()
    with anyio.fail_after(5):
        await serving.undisturbed()
    assert serving.profiling(other, active=True) == m.Done()
    assert profilers(serving) == [other.id]


async def test_a_new_daemon_spares_a_lease_no_longer_than_the_one_before(serving, now):
    lease = granted(serving)
    assert serving.profiling_resumed(lease.id, now[0] + 5)
    assert serving.profiling(lease, active=True) == m.Done()
    now[0] += 5
    assert serving.profilers() == []
    assert "was spared" in serving.profiling(lease, active=True).detail


@pytest.mark.parametrize("active", [True, False])
async def test_without_a_lease_nobody_profiles(serving, active):
    refused = serving.profiling(None, active=active)
    assert (refused.code, "attach first" in refused.detail) == (ErrorCode.UNAVAILABLE, True)


async def test_that_a_lease_profiles_is_parked_as_long_as_it_does(serving, parking, told):
    lease = granted(serving)
    mark = f"profiling.{lease.id}"
    serving.profiling(lease, active=True)
    await parking.ready()
    assert told() == [("FDSTORE", mark, 1), ("READY", "", 0)]
    serving.profiling(lease, active=True)
    await parking.ready()
    assert told() == [("FDSTOREREMOVE", mark, 0), ("FDSTORE", mark, 1), ("READY", "", 0)]
    serving.lease_ended(lease)
    await parking.ready()
    assert ("FDSTOREREMOVE", mark, 0) in told()
    assert serving.profilers() == []


async def test_what_an_earlier_daemon_was_told_is_believed_as_long_as_it_did(serving, now):
    lease = granted(serving)
    assert not serving.profiling_resumed("0e" * 8, now[0] + 5)
    assert serving.profiling_resumed(lease.id, now[0] + 5)
    assert serving.profilers() == [lease]
    now[0] += 5
    assert serving.profilers() == []
    assert serving.profiling_resumed(lease.id, now[0] + 1e9)
    now[0] += 300
    assert serving.profilers() == []


async def test_it_is_waited_for_others_and_for_each_of_them(serving):
    one, two = granted(serving), granted(serving, pid=8)
    serving.profiling(one, active=True)
    with anyio.fail_after(5):
        await serving.undisturbed(one.id)
    serving.profiling(two, active=True)
    done = []

    async def wait():
        await serving.undisturbed()
        done.append("nobody")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            for lease in (one, two):
                await anyio.wait_all_tasks_blocked()
                assert done == []
                serving.profiling(lease, active=False)
    assert done == ["nobody"]


async def test_memory_is_what_the_arena_takes(serving):
    assert serving.memory(m.Memory(key=KEY, device="CPU-0")) == m.MemoryHeld(nbytes=3 * PAGE)
    mismatch = serving.memory(m.Memory(key={**KEY, "tp_size": "2"}, device="CPU-0"))
    assert mismatch.fields == (m.Field(name="tp_size", daemon="1", engine="2"),)


async def test_warnings_are_told_beside_everything_else(serving):
    serving.warn("persistence mode is off")
    serving.warn("untested")
    assert serving.status().detail == "persistence mode is off; untested"
    serving.remark("systemd keeps nothing")
    assert serving.status().detail == "systemd keeps nothing; persistence mode is off; untested"
