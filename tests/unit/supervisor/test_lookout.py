from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import anyio
import pytest

from preloadd.domain.ids import Instance
from preloadd.domain.lifecycle import State
from preloadd.errors import ConfigError, ServiceManagerError
from preloadd.linux.locks import Lock
from preloadd.protocol.messages import LeaseTold
from preloadd.supervisor.devices import Device
from preloadd.supervisor.lookout import Lookout, Pace, View
from preloadd.supervisor.peers import Peers
from preloadd.supervisor.roster import Expected, Wanted
from preloadd.supervisor.verdict import Contact, Snapshot, Unit, judge
from tests.http_stand_in import serving

pytestmark = pytest.mark.anyio

PACE = Pace(ask=0.01, overdue=10.0, refused=0.02, surroundings=0.02, patience=10.0)
HASTY = replace(PACE, patience=0.1)
IMPATIENT = replace(PACE, overdue=0.2)


class Scene:
    """A lookout that watches, and ranks that come and go."""

    def __init__(self, ranks, tasks, pace: Pace) -> None:
        self.ranks = ranks
        self.wanted = Wanted(())
        self.rostered = lambda: self.wanted
        self.units: dict[str, Unit] = {}
        self.told_by_manager = lambda names: {n: u for n, u in self.units.items() if n in names}
        self.sampled = lambda: [Device("host", "host memory")]
        self.lookout = Lookout(
            ranks.socket_dir,
            self._rostered,
            pace=pace,
            units=self._told_by_manager,
            samples={"host memory": self._sampled},
        )
        self._tasks = tasks
        self._lives: dict[str, tuple[socket.socket, anyio.CancelScope]] = {}

    # Each may be exchanged while the lookout watches.

    def _rostered(self) -> Wanted:
        return self.rostered()

    def _told_by_manager(self, names):
        return self.told_by_manager(names)

    def _sampled(self):
        return self.sampled()

    def expect(self, *instances: str, group: str = "") -> None:
        self.wanted = Wanted(tuple(Expected(Instance.parse(name), group) for name in instances))

    def watch(self) -> None:
        self._tasks.start_soon(self.lookout.watch)

    def start(self, instance: str, **fields) -> None:
        """A rank that answers; with `silent`, one that only listens."""
        listener = self.ranks.listen(instance)
        scope = anyio.CancelScope()
        self._lives[instance] = listener, scope

        async def live() -> None:
            with scope:
                await self.ranks.serve(listener, instance, **fields)

        if not fields.pop("silent", False):
            self._tasks.start_soon(live)

    def listener(self, instance: str) -> socket.socket:
        return self._lives[instance][0]

    def end(self, instance: str) -> None:
        listener, scope = self._lives.pop(instance)
        scope.cancel()
        listener.close()

    def close(self) -> None:
        for instance in list(self._lives):
            self.end(instance)

    async def until(self, seen) -> View:
        with anyio.fail_after(5):
            # The lookout tells nobody of changes.
            while not seen(view := await self.lookout.look()):  # noqa: ASYNC110
                await anyio.sleep(0.005)
        return view


@asynccontextmanager
async def scene_of(ranks, pace: Pace = PACE) -> AsyncIterator[Scene]:
    async with anyio.create_task_group() as tasks:
        scene = Scene(ranks, tasks, pace)
        try:
            yield scene
        finally:
            scene.close()
            tasks.cancel_scope.cancel()


def rank(view: View, instance: str) -> Snapshot:
    return next(snapshot for snapshot in view.ranks if snapshot.instance == instance)


async def test_the_first_look_has_everything_in_the_order_wanted(ranks):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-2", "CPU-0", "CPU-1")
        for name in ("CPU-0", "CPU-1", "CPU-2"):
            scene.start(name)
        scene.watch()
        view = await scene.lookout.look()
        assert [snapshot.instance for snapshot in view.ranks] == ["CPU-2", "CPU-0", "CPU-1"]
        assert all(snapshot.state is State.SERVING for snapshot in view.ranks)
        view = await scene.until(lambda view: view.devices)
        assert [device.id for device in view.devices] == ["host"]


async def test_a_rank_that_answers_where_nobody_else_finds_it_is_told_of(ranks):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0")
        scene.watch()
        await scene.until(lambda view: rank(view, "CPU-0").state is State.SERVING)
        (ranks.socket_dir / "CPU-0" / "rank.sock").unlink()
        view = await scene.until(lambda view: rank(view, "CPU-0").condition == "absent")
        assert "there is no socket" in rank(view, "CPU-0").problem


async def test_looking_costs_the_ranks_nothing(ranks):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0")
        scene.watch()
        await scene.lookout.look()
        asked, began = ranks.asked["CPU-0"], anyio.current_time()
        for _ in range(1000):
            await scene.lookout.look()
        took = anyio.current_time() - began
        assert ranks.asked["CPU-0"] - asked <= took / PACE.ask + 1


async def test_stuck_ranks_are_told_as_stuck_and_delay_nobody(ranks):
    async with scene_of(ranks, IMPATIENT) as scene:
        scene.expect("CPU-0", "CPU-1", "CPU-2")
        scene.start("CPU-0", silent=True)
        scene.start("CPU-1")
        scene.start("CPU-2", silent=True)
        scene.watch()
        expected = ["stuck", "serving", "stuck"]
        await scene.until(lambda view: [r.condition for r in view.ranks] == expected)
        asked = ranks.asked["CPU-1"]
        view = await scene.until(lambda _: ranks.asked["CPU-1"] > asked + 5)
        assert rank(view, "CPU-0").silent_s >= IMPATIENT.overdue
        assert "no answer for" in judge(view.ranks).reasons[0]


async def test_a_stuck_rank_is_waited_for_on_one_connection(ranks):
    async with scene_of(ranks, IMPATIENT) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0", silent=True)
        scene.watch()
        await scene.until(lambda view: rank(view, "CPU-0").silent_s > 2 * IMPATIENT.overdue)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks.serve, scene.listener("CPU-0"), "CPU-0")
            await scene.until(lambda view: rank(view, "CPU-0").condition == "serving")
            tasks.cancel_scope.cancel()
        assert ranks.lines["CPU-0"] == 1


async def test_a_full_queue_is_stuck_as_well(ranks):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        with (
            ranks.listen("CPU-0", backlog=0),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
        ):
            other.connect(str(ranks.socket_dir / "CPU-0" / "rank.sock"))
            scene.watch()
            view = await scene.lookout.look()
        assert rank(view, "CPU-0").contact is Contact.STUCK
        assert "accepts no connection" in rank(view, "CPU-0").problem


async def test_a_rank_that_ends_and_comes_back_is_followed(ranks):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0", pid=7)
        scene.watch()
        await scene.lookout.look()
        scene.end("CPU-0")
        view = await scene.until(lambda view: rank(view, "CPU-0").contact is Contact.ABSENT)
        assert rank(view, "CPU-0").group == "g"
        assert str(ranks.socket_dir / "CPU-0" / "rank.sock") in rank(view, "CPU-0").problem
        scene.start("CPU-0", pid=8)
        view = await scene.until(lambda view: rank(view, "CPU-0").pid == 8)
        newest, *_, first = view.happenings
        assert (newest.condition, first.condition) == ("serving", "serving")
        assert "absent" in {h.condition for h in view.happenings}


async def test_a_rank_that_refuses_is_faulty(ranks):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0", refused="denied")
        scene.watch()
        view = await scene.lookout.look()
        assert rank(view, "CPU-0").contact is Contact.FAULTY
        assert rank(view, "CPU-0").problem == "not you"


async def test_ranks_join_and_leave(ranks):
    async with scene_of(ranks) as scene:
        scene.watch()
        assert (await scene.lookout.look()).ranks == ()
        scene.start("CPU-0")
        scene.expect("CPU-0")
        await scene.until(lambda view: view.ranks and rank(view, "CPU-0").condition == "serving")
        scene.wanted = Wanted((), "broken.toml")
        view = await scene.until(lambda view: not view.ranks)
        assert view.trouble == "broken.toml"


async def test_the_service_manager_is_heard_where_a_rank_is_silent(ranks):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0", group="llama")
        unit = Unit("preloadd@CPU-0.service", "activating", status="weights 40%")
        scene.units = {unit.name: unit}
        scene.watch()
        view = await scene.until(lambda view: rank(view, "CPU-0").condition == "starting")
        assert rank(view, "CPU-0").group == "llama"
        scene.units = {unit.name: Unit(unit.name, "failed", result="start-limit-hit")}
        await scene.until(lambda view: rank(view, "CPU-0").condition == "failed")
        await scene.until(lambda view: "start-limit-hit" in view.happenings[0].text)


@contextmanager
def hanging() -> Iterator[Callable[..., None]]:
    """A call that does not return before the end of the block, and then with an error."""
    over = threading.Event()

    def hang(*_) -> None:
        over.wait(10)
        raise ConfigError("at last")

    try:
        yield hang
    finally:
        over.set()


async def test_a_driver_that_hangs_delays_neither_the_first_look_nor_the_end(ranks):
    with hanging() as hang:
        began = anyio.current_time()
        async with scene_of(ranks, HASTY) as scene:
            scene.expect("CPU-0")
            scene.start("CPU-0")
            scene.sampled = hang
            scene.watch()
            view = await scene.lookout.look()
            assert view.ranks[0].condition == "serving"
            view = await scene.until(lambda view: view.silent)
            assert view.silent[0].startswith("host memory: not answering since 20")
            assert view.troubles == view.silent[0]
            assert not view.trouble
        assert anyio.current_time() - began < 2


@pytest.mark.parametrize("source", ["rostered", "told_by_manager"])
async def test_what_hangs_from_the_beginning_delays_the_first_look_for_its_patience(ranks, source):
    with hanging() as hang:
        async with scene_of(ranks, HASTY) as scene:
            scene.expect("CPU-0")
            scene.start("CPU-0")
            setattr(scene, source, hang)
            scene.watch()
            with anyio.fail_after(2):
                view = await scene.lookout.look()
            assert "not answering since" in view.troubles
            assert bool(view.trouble) == (source == "rostered")


async def test_what_hangs_later_freezes_only_what_it_tells(ranks):
    with hanging() as hang:
        async with scene_of(ranks, HASTY) as scene:
            scene.expect("CPU-0")
            scene.units = {"preloadd@CPU-0.service": Unit("preloadd@CPU-0.service", "failed")}
            scene.watch()
            await scene.until(lambda view: rank(view, "CPU-0").condition == "failed")
            usual, scene.told_by_manager = scene.told_by_manager, hang
            view = await scene.until(lambda view: view.silent)
            assert "systemd: not answering since" in view.silent[0]
            assert rank(view, "CPU-0").condition == "failed"
            scene.start("CPU-1")
            scene.expect("CPU-0", "CPU-1")
            view = await scene.until(lambda view: len(view.ranks) == 2)
            assert rank(view, "CPU-1").condition == "serving"
            scene.told_by_manager = usual


async def test_a_rank_that_upsets_this_program_is_faulty_and_told_of_once(
    ranks, caplog, monkeypatch
):
    def upset(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("preloadd.supervisor.snapshots.from_told", upset)
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0")
        scene.watch()
        view = await scene.until(lambda view: rank(view, "CPU-0").contact is Contact.FAULTY)
        assert "its log says why" in rank(view, "CPU-0").problem
        asked = ranks.asked["CPU-0"]
        await scene.until(lambda _: ranks.asked["CPU-0"] > asked + 1)
        assert caplog.text.count("Traceback") == 1


async def test_a_group_that_becomes_divided_is_told(ranks, caplog):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0")
        scene.watch()
        await scene.lookout.look()
        for divided in ("of two checkpoints", ""):
            ranks.become("CPU-0", divided=divided)
            expected = divided or "serving"
            await scene.until(lambda view, text=expected: view.happenings[0].text == text)
        warned = [record for record in caplog.records if "two checkpoints" in record.message]
        assert [record.levelname for record in warned] == ["WARNING"]


async def test_what_a_rank_writes_begins_no_line_of_its_own_in_the_log(ranks, caplog):
    caplog.set_level(logging.INFO)
    forged = "g\x1b[2J\nCPU-9 of prod: no weights"
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0", group=forged, state=State.FAILED, detail=forged)
        scene.watch()
        await scene.until(lambda view: rank(view, "CPU-0").condition == "failed")
    [line] = [record.message for record in caplog.records if "CPU-0" in record.message]
    assert line.isprintable()
    assert r"CPU-0 of g\x1b[2J\nCPU-9 of prod: no weights: failed: g" in line


async def test_a_rank_that_never_comes_is_warned_of_once(ranks, caplog):
    async with scene_of(ranks, HASTY) as scene:
        scene.expect("CPU-0")
        scene.watch()
        await scene.until(lambda _: caplog.text)
        await anyio.sleep(3 * PACE.surroundings)
        assert caplog.text.count("CPU-0: ") == 1
        assert "no daemon serves there" in caplog.text


async def test_a_rank_that_only_loads_is_no_reason_to_warn_and_one_that_gives_up_is(ranks, caplog):
    caplog.set_level(logging.INFO)
    folder = ranks.socket_dir / "CPU-0"
    folder.mkdir()
    async with scene_of(ranks, HASTY) as scene:
        scene.expect("CPU-0")
        with Lock.take(folder, "CPU-0"):
            scene.watch()
            view = await scene.until(lambda view: rank(view, "CPU-0").condition == "starting")
            [reason] = judge(view.ranks).reasons
            assert f"process {os.getpid()} runs and does not listen yet" in reason
            await anyio.sleep(2 * HASTY.patience)
            [told] = [record for record in caplog.records if "CPU-0: " in record.message]
            assert told.levelname == "INFO"
        await scene.until(lambda view: rank(view, "CPU-0").condition == "absent")
        told = [record for record in caplog.records if "CPU-0: no daemon" in record.message]
        assert [record.levelname for record in told] == ["WARNING"]


async def test_ranks_that_come_later_are_no_reason_to_warn_and_those_that_go_are(ranks, caplog):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.watch()
        await scene.until(lambda view: rank(view, "CPU-0").condition == "absent")
        assert caplog.text == ""
        scene.start("CPU-0")
        await scene.until(lambda view: rank(view, "CPU-0").condition == "serving")
        scene.end("CPU-0")
        await scene.until(lambda view: rank(view, "CPU-0").condition == "absent")
        assert "CPU-0 of g: " in caplog.text


async def test_a_manager_that_fails_is_told_and_what_it_said_before_still_holds(ranks, caplog):
    def fail(_):
        raise ServiceManagerError("Connection timed out")

    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.units = {"preloadd@CPU-0.service": Unit("preloadd@CPU-0.service", "failed")}
        scene.watch()
        await scene.until(lambda view: rank(view, "CPU-0").condition == "failed")
        usual, scene.told_by_manager = scene.told_by_manager, fail
        view = await scene.until(lambda view: view.silent)
        assert view.silent == ("systemd: Connection timed out",)
        assert rank(view, "CPU-0").condition == "failed"
        await anyio.sleep(3 * PACE.surroundings)
        assert caplog.text.count("Connection timed out") == 1
        scene.told_by_manager = usual
        await scene.until(lambda view: not view.silent)


async def test_other_nodes_are_in_the_view_and_delay_no_look(ranks):
    with serving(lambda _, over: over.wait(10)) as endpoint:
        peers = Peers([endpoint], identity="1", timeout=0.2, pause=1.0)
        async with anyio.create_task_group() as tasks:
            lookout = Lookout(ranks.socket_dir, lambda: Wanted(()), pace=PACE, peers=peers)
            tasks.start_soon(lookout.watch)
            with anyio.fail_after(0.15):
                view = await lookout.look()
            assert [peer.address for peer in view.peers] == [str(endpoint)]
            tasks.cancel_scope.cancel()


async def test_no_rank_is_shown_before_it_was_looked_at(ranks):
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0")
        scene.watch()
        await scene.lookout.look()
        scene.start("CPU-1")
        scene.expect("CPU-0", "CPU-1", group="g")
        seen = []
        await scene.until(lambda view: seen.append(view) or len(view.ranks) == 2)
        assert all(judge(view.ranks).healthy for view in seen)


async def test_an_engine_that_outlives_a_restart_is_no_news(ranks):
    lease = LeaseTold(id="1" * 16, client="vllm", pid=9, mode="zero_copy", generation="a" * 32)
    fields = {"leases": (lease,), "lease_count": 1, "generation": "a" * 32, "adopted": True}
    async with scene_of(ranks) as scene:
        scene.expect("CPU-0")
        scene.start("CPU-0", pid=7, **fields)
        scene.watch()
        await scene.lookout.look()
        scene.end("CPU-0")
        await scene.until(lambda view: rank(view, "CPU-0").contact is Contact.ABSENT)
        scene.start("CPU-0", pid=8, **fields)
        view = await scene.until(lambda view: rank(view, "CPU-0").pid == 8)
        texts = [happening.text for happening in view.happenings]
        assert texts[:2] == ["restarted: process 8 after 7", "serving, weights adopted"]
        assert not [text for text in texts if text.startswith("engine")]
