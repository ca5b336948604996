from dataclasses import fields

import pytest

from preloadd.domain.ids import Instance
from preloadd.domain.leases import Mode
from preloadd.domain.lifecycle import State
from preloadd.domain.lines import one_line
from preloadd.protocol.messages import LeaseTold, StatusTold
from preloadd.supervisor.roster import Expected
from preloadd.supervisor.snapshots import Record, from_told
from preloadd.supervisor.verdict import Contact, Engine, Snapshot, Unit
from tests.unit.supervisor.given import HOSTILE, told

CPU_0 = Expected(Instance.parse("CPU-0"))


@pytest.fixture
def record() -> Record:
    """Of a rank that has answered at 10 s after 0.5 s."""
    record = Record(CPU_0)
    record.asked(now=9.5)
    answer = told("CPU-0", pid=7, arena_bytes=5, uptime_s=100.0)
    record.answered(answer, now=10.0, wall=1_000.0)
    return record


def test_what_a_rank_tells_becomes_its_snapshot():
    lease = LeaseTold(id="0" * 16, client="vllm", pid=9, mode=Mode.ZERO_COPY, generation="a" * 32)
    answer = told(
        "CPU-0",
        state=State.LOADING,
        detail="reading",
        pid=7,
        model="tiny",
        phase="storing",
        done=3,
        total=4,
        arena_bytes=5,
        tensor_bytes=4,
        tensors=2,
        chunks=1,
        adopted=True,
        generation="a" * 32,
        leases=(lease,),
        lease_count=1,
        counters={"loads": 2, "bytes_read": 9},
    )
    assert from_told(CPU_0, answer) == Snapshot(
        "CPU-0",
        State.LOADING,
        group="g",
        device="CPU-0",
        role="target",
        detail="reading",
        pid=7,
        version="0",
        model="tiny",
        generation="a" * 32,
        adopted=True,
        tensors=2,
        tensor_bytes=4,
        arena_bytes=5,
        chunks=1,
        phase="storing",
        done=3,
        total=4,
        loads=2,
        bytes_read=9,
        lease_count=1,
        engines=(Engine("vllm", 9, "zero_copy", "0" * 16, "a" * 32),),
    )


def test_nothing_that_is_told_is_left_out_unawares():
    left = set(StatusTold.__struct_fields__) - {field.name for field in fields(Snapshot)}
    assert left == {"leases", "counters", "key", "warmup"}


@pytest.mark.parametrize("instance", ["CPU-0", f"CPU-7{HOSTILE}"])
def test_whatever_a_rank_writes_is_printable_from_here_on(instance):
    texts = {
        name
        for name, kind in StatusTold.__annotations__.items()
        if kind == "str" and name != "instance"
    }
    lease = LeaseTold(
        id=HOSTILE, client=f"\x1b[2J{HOSTILE}", pid=9, mode=Mode.COPY, generation=HOSTILE
    )
    answer = told(instance, **dict.fromkeys(texts, f"\x1b[2J{HOSTILE}"), leases=(lease,))
    snapshot = from_told(CPU_0, answer)
    assert snapshot.state is State.SERVING
    assert (snapshot.problem != "") == (instance != "CPU-0")
    assert snapshot.group == one_line(answer.group)
    for value in (snapshot, *snapshot.engines):
        written = [v for field in fields(value) if isinstance(v := getattr(value, field.name), str)]
        assert all(text.isprintable() for text in written), written


def test_an_answer_in_anothers_name_is_a_problem():
    snapshot = from_told(CPU_0, told("CPU-7"))
    assert snapshot.contact is Contact.FAULTY
    assert snapshot.problem == "its socket answers as CPU-7"


def test_an_answer_for_another_group_than_configured_is_a_problem():
    snapshot = from_told(Expected(CPU_0.instance, "llama"), told("CPU-0", group="qwen"))
    assert snapshot.contact is Contact.FAULTY
    for word in ("qwen", "llama", "restart the group"):
        assert word in snapshot.problem
    assert snapshot.group == "llama"


def test_before_the_first_answer_it_is_said_so():
    snapshot = Record(Expected(CPU_0.instance, "llama")).snapshot(now=0.0)
    assert (snapshot.contact, snapshot.group) == (Contact.ABSENT, "llama")
    assert snapshot.problem == "not asked yet"
    assert snapshot.age_s is None


def test_an_answer_ages(record):
    snapshot = record.snapshot(now=12.0)
    assert (snapshot.age_s, snapshot.ask_s, snapshot.silent_s) == (2.0, 0.5, 0.0)
    assert snapshot.started_at == 900.0


def test_the_start_does_not_jitter_with_every_answer(record):
    record.answered(told("CPU-0", pid=7, uptime_s=101.001), now=11.0, wall=1_001.0)
    assert record.snapshot(now=11.0).started_at == 900.0
    record.answered(told("CPU-0", pid=8, uptime_s=1.0), now=12.0, wall=1_002.0)
    assert record.snapshot(now=12.0).started_at == 1_001.0


def test_a_stuck_rank_keeps_what_it_told_but_does_not_serve(record):
    record.asked(now=11.0)
    record.silent()
    snapshot = record.snapshot(now=14.0)
    assert (snapshot.contact, snapshot.state) == (Contact.STUCK, None)
    assert (snapshot.arena_bytes, snapshot.age_s, snapshot.silent_s) == (5, 4.0, 3.0)
    record.answered(told("CPU-0"), now=15.0, wall=1_005.0)
    assert record.snapshot(now=15.0).state is State.SERVING
    assert record.snapshot(now=15.0).ask_s == 4.0


def test_of_a_lost_rank_only_the_group_is_remembered(record):
    record.lost(Contact.ABSENT, "no socket")
    snapshot = record.snapshot(now=14.0)
    assert (snapshot.contact, snapshot.problem, snapshot.group) == (
        Contact.ABSENT, "no socket", "g",
    )  # fmt: skip
    assert (snapshot.pid, snapshot.arena_bytes, snapshot.age_s) == (0, 0, None)


def test_the_unit_comes_along(record):
    unit = Unit("u", "active")
    assert record.snapshot(now=10.0, unit=unit).unit is unit
