from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from preloadd.domain.ids import Instance
from preloadd.domain.lifecycle import State
from preloadd.supervisor.devices import Device
from preloadd.supervisor.lookout import Lookout, Pace, View
from preloadd.supervisor.roster import Expected, Wanted
from preloadd.supervisor.verdict import Contact, Snapshot, Unit, judge

pytestmark = pytest.mark.anyio

PACE = Pace(ask=0.01, overdue=10.0, refused=0.02, surroundings=0.02)
IMPATIENT = replace(PACE, overdue=0.2)


class Scene:
    """A lookout that watches, and ranks that come and go."""

    def __init__(self, ranks, tasks, pace: Pace) -> None:
        self.ranks = ranks
        self.wanted = Wanted(())
        self.units: dict[str, Unit] = {}
        self.lookout = Lookout(
            ranks.socket_dir,
            lambda: self.wanted,
            pace=pace,
            units=lambda names: {n: u for n, u in self.units.items() if n in names},
            samples=[lambda: [Device("host", "host memory")]],
        )
        self._tasks = tasks
        self._lives: dict[str, tuple[socket.socket, anyio.CancelScope]] = {}

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
        assert [device.id for device in view.devices] == ["host"]


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
