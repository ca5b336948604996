import anyio
import pytest

from preloadd.domain.ids import Instance
from preloadd.domain.leases import Mode
from preloadd.domain.lifecycle import State
from preloadd.protocol.messages import LeaseTold
from preloadd.supervisor import snapshots
from preloadd.supervisor.snapshots import Lookout
from preloadd.supervisor.verdict import Engine, Snapshot


def look(ranks, told: dict[str, dict | None], *, timeout=5.0, times=1) -> list[Snapshot]:
    """The last of several looks at ranks that tell `told`; None listens and keeps silent."""

    async def main() -> list[Snapshot]:
        lookout = Lookout(
            ranks.socket_dir, [Instance.parse(name) for name in told], timeout=timeout
        )
        async with anyio.create_task_group() as tasks:
            listeners = {}
            for name, fields in told.items():
                if fields == {"absent": True}:
                    continue
                listeners[name] = ranks.listen(name)
                if fields is not None:
                    tasks.start_soon(lambda n=name, f=fields: ranks.serve(listeners[n], n, **f))
            seen: list[Snapshot] = []
            for _ in range(times):
                seen = list(await lookout.look())
            tasks.cancel_scope.cancel()
        for listener in listeners.values():
            listener.close()
        return seen

    return anyio.run(main)


def test_what_a_rank_tells_becomes_its_snapshot(ranks):
    lease = LeaseTold(id="0" * 16, client="vllm", pid=9, mode=Mode.ZERO_COPY, generation="a" * 32)
    (seen,) = look(
        ranks,
        {
            "CPU-0": {
                "state": State.LOADING,
                "detail": "reading",
                "model": "tiny",
                "done": 3,
                "total": 4,
                "arena_bytes": 5,
                "adopted": True,
                "generation": "a" * 32,
                "leases": (lease,),
                "lease_count": 1,
            }
        },
    )
    assert seen.pid > 0
    assert seen == Snapshot(
        "CPU-0",
        State.LOADING,
        detail="reading",
        pid=seen.pid,
        model="tiny",
        generation="a" * 32,
        adopted=True,
        arena_bytes=5,
        done=3,
        total=4,
        lease_count=1,
        engines=(Engine("vllm", 9, "zero_copy"),),
    )


def test_ranks_come_in_the_order_asked_for(ranks):
    seen = look(ranks, {f"CPU-{n}": {} for n in (2, 0, 1)})
    assert [snapshot.instance for snapshot in seen] == ["CPU-2", "CPU-0", "CPU-1"]
    assert all(snapshot.state is State.SERVING for snapshot in seen)


def test_stuck_ranks_are_told_as_stuck_and_delay_nobody(ranks):
    async def timed() -> float:
        return anyio.current_time()

    before = anyio.run(timed)
    told = {"CPU-0": None, "CPU-1": {}, "CPU-2": None, "CPU-3": None}
    seen = look(ranks, told, timeout=0.3)
    assert anyio.run(timed) - before < 0.9
    assert seen[1].state is State.SERVING
    for stuck in (seen[0], seen[2], seen[3]):
        assert stuck.state is None
        assert "within 0.3 s" in stuck.problem


def test_absent_rank_is_told_with_its_socket(ranks):
    (seen,) = look(ranks, {"CPU-0": {"absent": True}})
    assert seen.state is None
    assert str(ranks.socket_dir / "CPU-0" / "rank.sock") in seen.problem


def test_rank_that_answers_in_anothers_name_is_a_problem(ranks):
    (seen,) = look(ranks, {"CPU-0": {"instance": "CPU-7"}})
    assert seen.problem == "its socket answers as CPU-7"


@pytest.mark.parametrize(("fresh_for", "asked"), [(60.0, 1), (0.0, 5)])
def test_many_looks_cost_a_rank_one_question(ranks, monkeypatch, fresh_for, asked):
    monkeypatch.setattr(snapshots, "FRESH_FOR", fresh_for)
    look(ranks, {"CPU-0": {}}, times=5)
    assert ranks.asked == {"CPU-0": asked}
