"""The warm-up of a rank as its daemon has it: real files, and engines that follow a script."""

import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import msgspec
import pytest

from preloadd.domain.settings import Warmup
from preloadd.protocol.messages import Warmable
from preloadd.rank.fellows import Fellows
from preloadd.rank.warmup import rehearsal
from preloadd.rank.warmup.caches import Caches
from preloadd.rank.warmup.compiled_code import CompiledCode
from preloadd.rank.warmup.rehearsal import Outcome
from preloadd.rank.warmup.tables import Tables
from preloadd.rank.warmup.warmup import WarmUp
from preloadd.transport.threads import settle
from preloadd.warmup import folder
from preloadd.warmup.bundles.exchange import publish
from preloadd.warmup.bundles.index import listing
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import TableName
from preloadd.warmup.seeding import compile_cache, kinds, tables
from preloadd.warmup.seeding.kinds import Seeded
from preloadd.warmup.stores.opening import open_stores
from preloadd.warmup.table import Entry, Table, render
from tests.bundles import IDENTITY, write
from tests.tuned import H200

pytestmark = pytest.mark.anyio

HASH = "cd" * 32
TABLE = Table({"('fp8_gemm', 'R', ())": Entry("R", 1)}, H200)


class Life:
    """One life of a rank, as far as its warm-up goes."""

    def __init__(self, settings, service, rehearsal, code=None, **more) -> None:
        place = Path(settings.socket_dir, settings.instance)
        self.tables = Tables(place / "warmup.json", **more)
        self.warm_up = WarmUp(settings, self.tables, rehearsal, code)
        self._service = service

    def begin(self) -> None:
        self.warm_up.begin(self._service)

    async def finish(self, told=lambda _: None):
        return await self.warm_up.finish(self._service, Fellows({}), told)

    def told(self) -> tuple[str, ...]:
        """What is told of rehearsals."""
        lines = self.warm_up.told()
        return tuple(each for each in lines if not each.startswith(("tables:", "compiled code:")))


@pytest.fixture
def place(group):
    """The folder of the rank, which its daemon has made."""
    path = Path(group.socket_dir, group.instance)
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def life(group, service, scripted, place):
    """`life(script)`: one more life of the same rank, whose engine does that."""

    def life(script="say('done')", **more) -> Life:
        return Life(group, service, scripted(script), **more)

    return life


@pytest.fixture
def told(root):
    """What the loader of a rank tells whose tables and compiled code are below `root`."""
    return Warmable(
        config_hash=HASH,
        root=str(root / "tables"),
        ranks=((0, 0),),
        metadata=H200,
        identity=IDENTITY | {"cache_root": str(root), "engine_args": "[]"},
    )


def put(told: Warmable) -> None:
    folder.install(Path(told.root), HASH, {TableName(0, 0): TABLE}, Existing.REPLACE)


async def warm(life: Life, told: Warmable) -> None:
    """Have all there that an engine of that rank would make."""
    put(told)
    assert not await life.tables.wanted(msgspec.structs.replace(told, identity={}))


async def test_a_daemon_begins_before_a_load_and_finishes_when_it_serves(life, service, told):
    one = life()
    assert await one.finish() is None  # adopted weights are warm
    one.begin()
    assert service.warms_up()
    done = await one.finish()
    assert (done.outcome, service.warms_up()) == (Outcome.DONE, False)
    assert one.told() == (str(done),)
    assert service.warmed_s >= done.seconds
    one.begin()
    assert one.told() == ()
    await warm(one, told)
    assert await one.finish() is None
    assert not service.warms_up()
    one.begin()
    one.warm_up.give_up(service)
    assert await one.finish() is None
    assert not service.warms_up()


async def test_a_daemon_without_a_rehearsal_has_no_gate(group, service, place):
    one = Life(group, service, None)
    one.begin()
    assert not service.warms_up()
    assert await one.finish() is None
    assert "nothing is tuned for a processor" in one.told()[0]
    alone = replace(group, instance="CPU-0.draft", warmup=Warmup(trust_bundles=True))
    (line,) = Life(alone, service, None).told()
    assert line.startswith("no engine warms up here: a draft model")


@pytest.mark.parametrize("script", ["say('done')", "sys.exit(1)"])
async def test_the_gate_is_open_afterwards_however_it_went(life, service, script):
    one = life(script)
    one.begin()
    gate = service._gate
    done = await one.finish()
    assert (done.outcome is Outcome.DONE) == ("done" in script)
    with anyio.fail_after(1):
        await gate.opened()
    assert service.changed()[0].warming == ""


# -- as the next life has it --


def told_by(next_life: Life) -> tuple[str, ...]:
    next_life.warm_up.adopted("0a" * 16)
    return next_life.told()


async def test_a_life_that_adopts_says_how_the_warm_up_before_it_ended(life, told):
    assert told_by(life()) == ()
    first = life("sys.exit(3)")
    first.begin()
    (cut,) = told_by(life())
    assert "cut off as their daemon ended, and the first engine does it" in cut
    assert "preloadctl release tests, then preloadctl load tests" in cut
    failed = await first.finish()
    assert told_by(life()) == (str(failed),)
    assert "ended with 3" in str(failed)
    for is_warm in (False, True):
        again = life()
        assert told_by(again)
        again.begin()
        assert again.told() == ()
        if is_warm:
            await warm(again, told)
        await again.finish()
        assert told_by(life()) == ()
        first.begin()


async def test_a_warm_up_that_is_cancelled_was_cut_off(life):
    first = life("time.sleep(600)")
    first.begin()
    with anyio.move_on_after(0.1):
        await first.finish()
    assert "was cut off" in told_by(life())[0]


async def test_a_rank_that_does_not_rehearse_says_why_not_whatever_was_before(life, group, service):
    life().begin()
    assert "no engine warms up here" in told_by(Life(group, service, None))[0]


async def test_what_a_load_without_a_rehearsal_leaves_is_not_called_cut_off(life, group, service):
    life().begin()
    Life(group, service, None).begin()
    assert told_by(life()) == ()


async def test_caches_that_hang_hold_up_no_warm_up(life, monkeypatch):
    monkeypatch.setattr(rehearsal, "_LIST_S", 0.1)
    answer = threading.Event()
    monkeypatch.setattr(Caches, "listing", lambda _: answer.wait(30))
    one = life()
    one.begin()
    began = time.monotonic()
    done = await one.finish()
    assert (done.outcome, done.made) == (Outcome.DONE, None)
    assert str(done).startswith("warmed up in ")
    assert time.monotonic() - began < 5
    answer.set()
    settle(5)


async def test_a_folder_that_cannot_be_written_hinders_nobody(scripted, group, service, caplog):
    one = Life(group, service, scripted("say('done')"))
    one.begin()
    assert "not-warm.txt could not be written: No such file" in caplog.text
    assert (await one.finish()).outcome is Outcome.DONE


# -- looking for what there is --


async def looks_for(one: Life, told: Warmable) -> None:
    """A load has begun whose tables only a peer can have."""
    one.begin()
    assert not await one.tables.wanted(told)


async def test_what_is_looked_for_takes_no_longer_than_warm_up_may(life, group, service, told):
    async def fetch(_, *, within):
        await anyio.sleep_forever()

    short = replace(group, warmup=replace(group.warmup, deadline=0.2))
    one, progress = Life(short, service, life().warm_up._rehearsal, fetch=fetch), []
    await looks_for(one, told)
    done = await one.finish(progress.append)
    assert done.outcome is Outcome.FAILED
    assert "took longer than 0.2 s" in one.told()[0]
    assert progress
    assert service.changed()[0].warming == ""


async def test_whoever_cannot_wait_ends_the_looking_as_well(life, service, told):
    async def fetch(_, *, within):
        service._gate.end("a release")
        await anyio.sleep_forever()

    one = life(fetch=fetch)
    await looks_for(one, told)
    with anyio.fail_after(5):
        done = await one.finish()
    assert (done.outcome, done.why) == (Outcome.ENDED, "a release")


# -- tables, and compiled code --


def code(*, stores=None, fetch=None) -> CompiledCode:
    return CompiledCode(trusted=True, stores=lambda: stores, fetch=fetch, wall=lambda: 0.0)


@pytest.fixture
def makes(told):
    """What an engine does that leaves a table and compiled code."""
    table = Path(told.root, HASH, str(TableName(0, 0)))
    return f"""
from tests.bundles import write
write(Path({told.identity["cache_root"]!r}))
table = Path({str(table)!r})
table.parent.mkdir(parents=True, exist_ok=True)
table.write_bytes({render(TABLE)!r})
"""


async def warmed_up(one: Life, told: Warmable):
    """How it came out after a load."""
    await looks_for(one, told)
    return await one.finish()


async def test_what_an_engine_made_is_told_and_had_in_the_next_life(life, told, makes):
    one = life(makes + "say('done')", code=code())
    assert (await warmed_up(one, told)).outcome is Outcome.DONE
    tuned, compiled, _ = one.warm_up.told()
    assert tuned.startswith("tables: tuned by an engine, /")
    assert compiled == "compiled code: 2 folders made by an engine"
    one.warm_up.loaded("0a" * 16)
    async with working(one):
        await one.warm_up.settled()
    again = life(code=code())
    again.warm_up.adopted("0a" * 16)
    assert again.warm_up.told() == (f"tables: as before, below {told.root}",)
    assert await again.finish() is None
    async with working(again):
        await again.warm_up.settled()
    given = again.warm_up.given()
    assert list(given[tables.KIND](HASH)) == [str(TableName(0, 0))]
    assert list(given[compile_cache.KIND](HASH)) == [compile_cache.ANSWER]
    assert await warmed_up(life(code=code()), told) is None  # all is there


async def test_what_an_engine_left_that_failed_is_not_taken_for_whole(life, told, makes):
    one = life(makes + "sys.exit(3)", code=code())
    assert (await warmed_up(one, told)).outcome is Outcome.FAILED
    assert "engine, " not in str(one.warm_up.told())
    assert "made by" not in str(one.warm_up.told())
    # Nor does it keep others from compiling there.
    other = life(makes + "say('done')", code=code())
    assert (await warmed_up(other, told)).outcome is Outcome.DONE
    assert "another group" not in str(other.warm_up.told())


async def test_a_source_that_does_not_answer_is_waited_for_once(life, told, tmp_path):
    """Tables and code share the time that is allowed for it."""
    allowed = []

    async def fetch(_, *, within):
        allowed.append(within)
        await anyio.sleep(within)
        return Seeded(kinds.Outcome.UNREACHABLE, "connection refused")

    (tmp_path / "shared").mkdir()
    with open_stores([f"file:{tmp_path / 'shared'}"], {}) as stores:
        one = life(code=code(stores=stores, fetch=fetch), fetch=fetch, within=0.3)
        await warmed_up(one, told)
        await warmed_up(one, told)
    assert allowed == [0.3, 0.3]


# -- FlashInfer's own store, of which nobody can tell what it holds --


@pytest.fixture
def unseen(told):
    """What the loader of one rank tells, whose engines tune into that store."""
    return msgspec.structs.replace(told, root="", metadata={}, why_not="FlashInfer's own store")


@pytest.fixture
def fetched(told, tmp_path):
    """Makes what sees to compiled code, and has a source and a store with all of it."""

    def fetched() -> CompiledCode:
        async def fetch(wanted, *, within):
            return Seeded(kinds.Outcome.FETCHED, value=bundle)

        return code(stores=stores, fetch=fetch)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(elsewhere)
    (tmp_path / "shared").mkdir()
    with open_stores([f"file:{tmp_path / 'shared'}"], {}) as stores:
        folders = tuple(listing(elsewhere))
        bundle = publish(elsewhere, folders, told.identity, stores, now=0.0)
        yield fetched


async def test_a_bundle_that_was_fetched_fills_no_store_of_flashinfer(life, unseen, fetched):
    one = life("sys.exit(3)", code=fetched())
    assert (await warmed_up(one, unseen)).outcome is Outcome.FAILED
    assert "installed from the source, 2 folders" in one.warm_up.told()[1]
    async with working(one):
        await one.warm_up.settled()
    # What is on the disk by now tells of an engine's work only if it came to a good end.
    again = life(code=fetched())
    assert (await warmed_up(again, unseen)).outcome is Outcome.DONE
    assert "as before, 2 folders" in again.warm_up.told()[1]
    assert await warmed_up(life(code=fetched()), unseen) is None


async def test_where_nothing_is_tuned_a_bundle_is_enough(life, unseen, fetched):
    untuned = msgspec.structs.replace(unseen, untuned=True)
    assert await warmed_up(life("sys.exit(3)", code=fetched()), untuned) is None


async def test_no_engine_is_started_for_nothing(life, unseen):
    """Eager engines compile nothing, and older GPUs are not tuned for."""
    eager = msgspec.structs.replace(unseen, identity={})
    assert (await warmed_up(life(code=code()), eager)).outcome is Outcome.DONE
    nothing = msgspec.structs.replace(eager, untuned=True)
    assert await warmed_up(life("sys.exit(3)", code=code()), nothing) is None


@asynccontextmanager
async def working(one: Life):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.warm_up.work)
        with anyio.fail_after(10):
            yield
        tasks.cancel_scope.cancel()


async def test_tables_of_an_engine_are_published_while_it_serves(life, told, makes, tmp_path):
    (tmp_path / "shared").mkdir()
    one = life(
        makes + "say('done')", stores=lambda: open_stores([f"file:{tmp_path / 'shared'}"], {})
    )
    await one.warm_up.open()
    assert (await warmed_up(one, told)).outcome is Outcome.DONE
    async with working(one):
        while "tables: published to the shared stores" not in one.warm_up.told():  # noqa: ASYNC110
            await anyio.sleep(0.01)
    one.tables.close()


async def test_others_are_not_answered_before_a_rank_is_warm(life):
    one = life(code=code())
    one.begin()
    async with working(one):
        with anyio.move_on_after(0.05) as early:
            await one.warm_up.settled()
        assert early.cancelled_caught
        await one.finish()
        await one.warm_up.settled()


async def test_code_is_for_others_only_where_an_engine_makes_some(life, group, service):
    with_code, without = life(code=code()).warm_up, Life(group, service, None).warm_up
    await without.settled()
    assert [kind.name for kind in without.kinds()] == list(without.given()) == [tables.KIND]
    assert [kind.name for kind in with_code.kinds()] == [tables.KIND, compile_cache.KIND]
    assert list(with_code.given()) == [tables.KIND, compile_cache.KIND, compile_cache.WHOLE]
