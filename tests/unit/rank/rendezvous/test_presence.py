"""Ranks that meet over real sockets in this process; what they load is made up.

Those of real daemons are in tests/process.
"""

import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from preloadd.domain.settings import Deadlines, Rendezvous, Source
from preloadd.errors import LoaderFailed, RendezvousFailed
from preloadd.rank.rendezvous import presence as module
from preloadd.rank.rendezvous.presence import Presence
from tests.ports import free_port

pytestmark = pytest.mark.anyio

HERE = "127.0.0.1"
KEY = {"checkpoint": "full:00", "dtype": "float16"}


@pytest.fixture(autouse=True)
def hurried(monkeypatch) -> None:
    monkeypatch.setattr(module, "_BACK_S", 0.05)
    monkeypatch.setattr(module, "_AGAIN_S", 0.02)


@pytest.fixture
def presence(settings):
    """Makes ranks of one group; `waits` of each is what it waited for."""
    port = free_port()

    def presence(rank, *, world=2, patience=10.0, silence=5.0, draft=None) -> Presence:
        place = Rendezvous(HERE, port, rank, world, rank, world)
        limits = Deadlines(rendezvous=patience, peer_silence=silence)
        model = replace(settings.model, partner=draft)
        waits: list[str] = []
        made = Presence(
            replace(settings, rendezvous=place, deadlines=limits, model=model),
            place,
            lambda progress: waits.append(progress.phase),
        )
        made.waits = waits
        return made

    return presence


@asynccontextmanager
async def working(*presences):
    async with anyio.create_task_group() as tasks:
        for each in presences:
            tasks.start_soon(each.work)
        yield tasks
        tasks.cancel_scope.cancel()


class Load:
    """A load that fills when it may, and ends when it is told to."""

    def __init__(self, rank: int, **changes) -> None:
        self.key = KEY | {"tp_rank": str(rank)} | changes
        self.fills = anyio.Event()
        self.ends = anyio.Event()
        self.cancelled = False
        self.pause_s = 0.0

    async def __call__(self, agree):
        try:
            await anyio.sleep(self.pause_s)
            await agree(self.key)
            self.fills.set()
            await self.ends.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled = True
            raise
        return self.key["tp_rank"]


class Held:
    """A load under way with what became of it."""

    def __init__(self, tasks, presence, load) -> None:
        self.load = load
        self.result = None
        self.error: Exception | None = None
        self.over = anyio.Event()
        tasks.start_soon(self._run, presence)

    async def _run(self, presence) -> None:
        try:
            self.result = await presence.hold(self.load)
        except (RendezvousFailed, LoaderFailed) as error:
            self.error = error
        self.over.set()

    async def why(self) -> str:
        with anyio.fail_after(10):
            await self.over.wait()
        assert isinstance(self.error, RendezvousFailed), (self.error, self.result)
        assert self.load.cancelled
        return str(self.error)


async def test_all_fill_once_all_agree_and_none_before(presence):
    ranks = [presence(0), presence(1)]
    loads = [Load(0), Load(1)]
    async with working(*ranks) as tasks:
        held = [Held(tasks, ranks[1], loads[1])]
        await anyio.sleep(0.1)
        assert not loads[1].fills.is_set()
        assert set(ranks[1].waits) == {"waiting for rank 0 of node 0"}
        held.append(Held(tasks, ranks[0], loads[0]))
        with anyio.fail_after(5):
            for load, each in zip(loads, reversed(held), strict=True):
                await load.fills.wait()
                load.ends.set()
                await each.over.wait()
        assert [each.result for each in reversed(held)] == ["0", "1"]


async def test_ranks_that_disagree_all_end_with_both_values(presence):
    ranks = [presence(0), presence(1)]
    async with working(*ranks) as tasks:
        held = [Held(tasks, ranks[0], Load(0)), Held(tasks, ranks[1], Load(1, dtype="float32"))]
        for each in held:
            why = await each.why()
            assert why.startswith("group tests: ")
            assert "'float32' for rank 1 of node 1" in why
            assert "'float16' for rank 0 of node 0" in why


async def test_ranks_of_which_only_one_has_a_draft_beside_it_all_end_at_once(presence):
    """What they load is the same, but the draft would wait in vain."""
    ranks = [presence(0, draft=Source("/srv/draft", "draft")), presence(1)]
    async with working(*ranks) as tasks:
        held = [Held(tasks, rank, Load(n)) for n, rank in enumerate(ranks)]
        for each in held:
            why = await each.why()
            assert "draft is 'not held' for rank 1 of node 1 but 'held' for rank 0 of" in why
            assert "give all nodes the same model, settings" in why


@pytest.mark.slow
@pytest.mark.parametrize("silences", [(0.9, 60.0), (60.0, 0.9)])
async def test_nodes_of_different_patience_do_not_take_each_other_for_lost(presence, silences):
    ranks = [presence(n, silence=silence) for n, silence in enumerate(silences)]
    async with working(*ranks) as tasks:
        loads = [Load(0), Load(1)]
        held = [Held(tasks, *each) for each in zip(ranks, loads, strict=True)]
        with anyio.fail_after(5):
            for load in loads:
                await load.fills.wait()
            await anyio.sleep(2.0)
            for load, each in zip(loads, held, strict=True):
                load.ends.set()
                await each.over.wait()
        assert [each.error for each in held] == [None, None]


@pytest.mark.slow
async def test_a_rank_that_served_asks_anew_before_it_fills_again(presence):
    ranks = [presence(0), presence(1)]
    async with working(*ranks) as tasks:
        loads = [Load(0), Load(1)]
        held = [Held(tasks, *each) for each in zip(ranks, loads, strict=True)]
        for load in loads:
            load.ends.set()
        for each in held:
            await each.over.wait()
        again = Load(1, dtype="bfloat16")
        again.pause_s = 5 * ranks[1]._tick_s
        why = await Held(tasks, ranks[1], again).why()
    assert "bfloat16" in why
    assert not again.fills.is_set()


async def test_those_that_disagreed_may_agree_the_next_time(presence):
    ranks = [presence(0), presence(1)]
    async with working(*ranks) as tasks:
        held = [Held(tasks, ranks[0], Load(0)), Held(tasks, ranks[1], Load(1, dtype="bfloat16"))]
        for each in held:
            await each.why()
        loads = [Load(0), Load(1)]
        held = [Held(tasks, *each) for each in zip(ranks, loads, strict=True)]
        with anyio.fail_after(10):
            for load in loads:
                await load.fills.wait()
                load.ends.set()
            for each in held:
                await each.over.wait()
    assert [each.error for each in held] == [None, None]


async def test_a_load_that_fails_is_told_to_others_and_keeps_its_own_error(presence):
    async def broken(agree):
        await agree(KEY)
        raise LoaderFailed("the disk is on fire", 7)

    ranks = [presence(0), presence(1)]
    for victim in (0, 1):
        async with working(*ranks) as tasks:
            loads = [Load(0), Load(1)]
            loads[victim] = broken
            held = [Held(tasks, *each) for each in zip(ranks, loads, strict=True)]
            assert (
                f"rank {victim} of node {victim} failed: the disk is on fire"
                in await held[1 - victim].why()
            )
            await held[victim].over.wait()
            assert str(held[victim].error) == "the disk is on fire"
        ranks = [presence(0), presence(1)]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("late", [0, 1])
async def test_a_load_that_fails_before_it_claims_is_told_to_who_came_or_comes_soon(
    presence, victim, late
):
    """Its own side waits a moment for those that are started a little later."""

    async def broken(_agree):
        raise LoaderFailed("/srv/m: no such folder", 66)

    ranks, loads = [presence(0), presence(1)], [Load(0), Load(1)]
    loads[victim] = broken
    held = [None, None]
    async with anyio.create_task_group() as tasks:
        for number in (1 - late, late):
            tasks.start_soon(ranks[number].work)
            held[number] = Held(tasks, ranks[number], loads[number])
            await anyio.sleep(0.2)
        told = f"rank {victim} of node {victim} failed: /srv/m: no such folder"
        assert told in await held[1 - victim].why()
        with anyio.fail_after(5):
            await held[victim].over.wait()
        assert str(held[victim].error) == "/srv/m: no such folder"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_load_that_fails_alone_does_not_wait_for_long(presence, monkeypatch, rank):
    async def broken(_agree):
        raise LoaderFailed("no", 1)

    monkeypatch.setattr(module, "_LINGER_S", 0.2)
    async with working(alone := presence(rank)):
        with anyio.fail_after(2), pytest.raises(LoaderFailed, match="no"):
            await alone.hold(broken)


async def test_the_missing_are_named_when_time_is_up(presence):
    ranks = [presence(0, world=3, patience=0.5), presence(1, world=3, patience=0.5)]
    async with working(*ranks) as tasks:
        held = [Held(tasks, rank, Load(n)) for n, rank in enumerate(ranks)]
        for each in held:
            assert "rank 2 of node 2 did not come" in await each.why()
    assert "waiting for rank 2 of node 2" in ranks[1].waits


async def test_who_reaches_nobody_says_what_it_tried(presence):
    rank = presence(1, patience=0.3)
    async with working(rank) as tasks:
        why = await Held(tasks, rank, Load(1)).why()
    assert "rank 0 of node 0 was not reached" in why
    assert "Connection refused" in why


async def test_ranks_that_serve_are_there_for_those_that_come_back(presence):
    for loader in (0, 1):
        ranks = [presence(0), presence(1)]
        async with working(*ranks) as tasks:
            ranks[1 - loader].serves(KEY | {"tp_rank": str(1 - loader)})
            load = Load(loader)
            held = Held(tasks, ranks[loader], load)
            with anyio.fail_after(5):
                await load.fills.wait()
                load.ends.set()
                await held.over.wait()
            assert held.result == str(loader)


async def test_a_rank_that_serves_goes_on_when_rank_0_is_lost_and_meets_the_next_one(presence):
    first, second = presence(0), presence(1)
    async with working(second) as tasks:
        second.serves(KEY)
        async with working(first):
            first.serves(KEY)
            await anyio.sleep(0.1)
        async with working(again := presence(0)) as more:
            load = Load(0)
            held = Held(more, again, load)
            with anyio.fail_after(5):
                await load.fills.wait()
                load.ends.set()
                await held.over.wait()
            # Once more, after a release of what was just loaded.
            for rank, scope in ((again, more), (second, tasks)):
                load = Load(0)
                held = Held(scope, rank, load)
                with anyio.fail_after(5):
                    await load.fills.wait()
                    load.ends.set()
                    await held.over.wait()
                assert held.error is None


async def test_a_taken_port_fails_the_load_but_no_rank_that_serves(presence):
    rank = presence(0)
    with socket.create_server((HERE, rank._place.port)):
        async with working(rank):
            with pytest.raises(RendezvousFailed, match="is taken"):
                await rank.hold(Load(0))
            rank.serves(KEY)
            load = Load(0)
            load.ends.set()
            assert await rank.hold(load) == "0"


async def test_a_load_that_is_cancelled_leaves_at_once(presence):
    rank = presence(1)
    async with working(rank):
        load = Load(1)
        with anyio.move_on_after(0.1):
            await rank.hold(load)
        assert load.cancelled
