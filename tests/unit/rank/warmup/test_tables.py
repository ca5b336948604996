"""Where a rank finds tables, in what order and how fast; and what it tells."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from preloadd.errors import ConfigError, ErrorCode, PreloadError
from preloadd.linux.private import locked_folder
from preloadd.protocol.messages import Tuned, Warmable
from preloadd.rank.warmup import tables as module
from preloadd.rank.warmup.places import store_key
from preloadd.rank.warmup.tables import Tables
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import TableName
from preloadd.warmup.seeding.kinds import Outcome, Seeded
from preloadd.warmup.stores.chain import Stores
from preloadd.warmup.stores.worker import Worker
from preloadd.warmup.table import Entry, Table, parse, render
from tests.tuned import H200

pytestmark = pytest.mark.anyio

HASH = "cd" * 32
NAMES = (TableName(0, 0), TableName(0, 1))
TABLE = Table({"('fp8_gemm', 'R', ())": Entry("R", 1)}, H200)
OTHER = Table({"('fp8_gemm', 'R', ())": Entry("R", 2)}, H200)
ELSEWHERE = Table(TABLE.entries, H200 | {"gpu": "NVIDIA B200"})
MORE = Table(TABLE.entries | {"('bf16_gemm', 'R', ())": Entry("R", 1)}, H200)
EMPTY = Table({}, H200)
LARGE = {"_metadata": H200, "('fp8_gemm', 'R', ())": ["R", [0] * 1_000_000]}
"""A table that is small enough as it is, and too much once it is written."""

UNKNOWN = Table(TABLE.entries, H200 | {"cudnn_version": "unknown"})


class Broken(PreloadError):
    code = ErrorCode.UNAVAILABLE


class Shelf:
    """A store that holds what the test puts there; `act` is done before anything is looked at."""

    def __init__(self, tables: dict[TableName, Table] | None = None, act=lambda: None) -> None:
        self.held = {store_key(HASH, n): render(table) for n, table in (tables or {}).items()}
        self.names, self.faults, self.closed = ("shelf",), (), False
        self._act = act

    def find(self, key: str, limit: int, fit=None) -> bytes | None:
        self._act()
        found = self.held.get(key)
        assert found is None or len(found) <= limit
        return found if found is None or fit is None or fit(found) else None

    def keep(self, key: str, value: bytes, fit=None) -> None:
        self._act()
        if fit is not None and key in self.held and not fit(self.held[key]):
            self.held[key] = value
        self.held.setdefault(key, value)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def warmable(tmp_path) -> Warmable:
    return Warmable(
        config_hash=HASH,
        dp_rank=0,
        rank=1,
        root=str(tmp_path / "root"),
        ranks=tuple((name.dp_rank, name.rank) for name in NAMES),
        metadata=H200,
        tunes=True,
    )


@pytest.fixture
def rank(tmp_path) -> Callable:
    """What a rank does about tables, with stores that are open."""

    @asynccontextmanager
    async def rank(shelf: Shelf | None = None, **more):
        here = Tables(
            tmp_path / "warmup.json", stores=None if shelf is None else lambda: shelf, **more
        )
        await here.open()
        yield here
        here.close()

    return rank


def put(root, *tables: Table) -> None:
    new = dict(zip(NAMES, tables, strict=False))
    folder.install(root, HASH, new, Existing.REPLACE)


def installed(root) -> list[Table | None]:
    raw = [folder.stored(root, HASH, name) for name in NAMES]
    return [None if one is None else parse(one, "it") for one in raw]


def source(*tables: Table | None) -> Callable:
    """A peer that has these, in the order of ranks."""

    async def fetch(wanted, *, within):
        assert 0 < within <= 60
        table = tables[wanted.name.rank]
        if table is None:
            return Seeded(Outcome.MISSING, "10.0.0.1:9000: it has none")
        return Seeded(Outcome.FETCHED, "", table)

    return fetch


async def told(here: Tables, text: str) -> None:
    """Wait until that is told."""
    with anyio.fail_after(5):
        while not any(text in line for line in here.told()):  # noqa: ASYNC110 - nothing tells
            await anyio.sleep(0.01)


async def test_without_anything_to_be_had_the_loader_tunes(rank, warmable):
    async with rank() as here:
        assert await here.wanted(warmable)
        assert here.told() == ()


async def test_tables_on_the_disk_are_enough(rank, warmable, tmp_path):
    put(tmp_path / "root", TABLE, TABLE)
    async with rank(fetch=pytest.fail) as here:
        assert not await here.wanted(warmable)
        (line,) = here.told()
    assert line.startswith("tables: found on disk, /")
    assert "autotune_configs_dp0_rank1.json" in line


@pytest.mark.parametrize(
    "tables",
    [[TABLE], [TABLE, UNKNOWN], [UNKNOWN, TABLE], [TABLE, MORE], [EMPTY, EMPTY]],
    ids=["one is missing", "the own does not know where", "another's does not", "mixed", "empty"],
)
async def test_tables_of_some_ranks_are_not(rank, warmable, tmp_path, tables):
    put(tmp_path / "root", *tables)
    async with rank() as here:
        assert await here.wanted(warmable)


async def test_a_damaged_table_is_none(rank, warmable, tmp_path):
    put(tmp_path / "root", TABLE, TABLE)
    (tmp_path / "root" / HASH / str(NAMES[1])).write_text('{"a": [1]}')
    async with rank() as here:
        assert await here.wanted(warmable)


async def test_one_of_another_environment_stays_and_keeps_the_loader_from_tuning(
    rank, warmable, tmp_path
):
    put(tmp_path / "root", TABLE, ELSEWHERE)
    async with rank(Shelf(dict.fromkeys(NAMES, TABLE))) as here:
        assert not await here.wanted(warmable)
        (line,) = here.told()
        assert here.troubles() == (line,)
    assert "gpu is 'NVIDIA B200' there and 'NVIDIA H200' here" in line
    assert "is not overwritten: remove it" in line
    assert installed(tmp_path / "root")[1].metadata == ELSEWHERE.metadata


async def test_stores_come_before_a_peer_and_all_ranks_get_theirs(rank, warmable, tmp_path):
    async with rank(Shelf(dict.fromkeys(NAMES, TABLE)), fetch=pytest.fail) as here:
        assert not await here.wanted(warmable)
        (line,) = here.told()
    assert line.startswith("tables: installed from a shared store, /")
    assert [one.entries for one in installed(tmp_path / "root")] == [TABLE.entries] * 2


async def test_what_a_store_has_not_of_all_ranks_is_asked_of_the_peer(rank, warmable, tmp_path):
    async with rank(Shelf({NAMES[1]: TABLE}), fetch=source(OTHER, OTHER)) as here:
        assert not await here.wanted(warmable)
        assert here.told()[0].startswith("tables: installed from a peer, /")
    assert [one.entries for one in installed(tmp_path / "root")] == [OTHER.entries] * 2


async def test_a_peer_that_has_not_all_is_told_and_nothing_installed(rank, warmable, tmp_path):
    async with rank(fetch=source(TABLE, None)) as here:
        assert await here.wanted(warmable)
        assert here.told() == ("tables: not seeded (missing): 10.0.0.1:9000: it has none",)
    assert not (tmp_path / "root").exists()


BAD = {
    "noise": b"noise",
    "of elsewhere": render(ELSEWHERE),
    "that does not know where": render(UNKNOWN),
    "that says nothing of where": render(Table(TABLE.entries)),
    "malformed": b'{"a": 5}',
    "that is of another tuning": render(MORE),
    "that is empty": render(EMPTY),
    "that is too much for a file": json.dumps(LARGE, separators=(",", ":")).encode(),
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD)
async def test_what_a_store_has_is_judged_as_a_peers(rank, warmable, tmp_path, raw):
    shelf = Shelf(dict.fromkeys(NAMES, TABLE))
    shelf.held[store_key(HASH, NAMES[1])] = raw
    async with rank(shelf) as here:
        assert await here.wanted(warmable)
        (note,) = here.told()
    assert note.startswith("tables: shared stores: ")
    assert not (tmp_path / "root").exists()


async def test_stores_delay_nobody(rank, warmable, monkeypatch):
    monkeypatch.setattr(module, "STORE_S", 0.2)
    done = threading.Event()
    async with rank(Shelf(act=lambda: done.wait(20))) as here:
        since = time.monotonic()
        assert await here.wanted(warmable)
        assert time.monotonic() - since < 2
        assert "a store did not answer within 0.2 s" in here.told()[0]
    done.set()


async def test_a_peer_delays_nobody(rank, warmable):
    """All tables together take no longer than is allowed for it."""
    allowed = []

    async def fetch(_, *, within):
        allowed.append(within)
        await anyio.sleep(0.15)
        return Seeded(Outcome.FETCHED, "", TABLE)

    async with rank(fetch=fetch, within=0.2) as here:
        assert not await here.wanted(warmable)
    first, second = allowed
    assert first == pytest.approx(0.2, abs=0.01)
    assert second < 0.06


async def test_a_peer_is_asked_for_nothing_once_there_is_no_time(rank, warmable):
    asked = []

    async def fetch(wanted, *, within):
        asked.append(wanted.name)
        await anyio.sleep(within)
        return Seeded(Outcome.FETCHED, "", TABLE)

    async with rank(fetch=fetch, within=0.05) as here:
        assert await here.wanted(warmable)
        (note,) = here.told()
    assert asked == [NAMES[0]]
    assert note == f"tables: not seeded: no time was left to ask for {NAMES[1]}"


async def test_a_store_that_fails_is_passed_over(rank, warmable):
    def act():
        raise Broken("its server is away")

    async with rank(Shelf(act=act), fetch=source(TABLE, TABLE)) as here:
        assert not await here.wanted(warmable)
        assert "tables: shared stores: its server is away" in here.told()


async def test_stores_tell_what_is_wrong_with_them(rank):
    shelf = Shelf()
    shelf.faults = ("mooncake: no answer",)
    async with rank(shelf) as here:
        assert here.told() == ("store mooncake: no answer",)


async def test_what_cannot_be_installed_is_tuned(rank, warmable, tmp_path):
    (tmp_path / "root").write_text("in the way")
    async with rank(fetch=source(TABLE, TABLE)) as here:
        assert await here.wanted(warmable)
        told = here.told()
    assert any("cannot be installed" in line for line in told), told


async def test_why_a_loader_does_not_tune_is_told(rank):
    async with rank() as here:
        assert not await here.wanted(Warmable(why_not="the weights are in host memory"))
        assert here.told() == ("tables: not tuned: the weights are in host memory",)
        assert here.troubles() == ()


async def test_tables_of_a_loader_that_does_not_tune_can_be_fetched_later(rank, warmable, tmp_path):
    """As for vLLM's engines, which tune for themselves unless there are tables for all of them."""
    told = msgspec.structs.replace(warmable, tunes=False)
    async with rank(fetch=source(TABLE, TABLE)) as here:
        assert not await here.found()
        assert not await here.wanted(told)
        assert here.told() == ()
        assert await here.found()
        assert here.told()[0].startswith("tables: installed from a peer, ")
    assert None not in installed(tmp_path / "root")
    async with rank(fetch=source(None, None)) as other:
        await other.wanted(msgspec.structs.replace(told, config_hash="ef" * 32))
        assert not await other.found()


async def test_that_it_is_switched_off_is_told(rank):
    async with rank(enabled=False) as here:
        assert here.told() == ("tables: not tuned, which is switched off",)


LIES = {
    "no hash": {"config_hash": "../../etc"},
    "no absolute root": {"root": "tables"},
    "the own rank is none": {"ranks": ((0, 0),)},
    "a negative rank": {"ranks": ((0, 1), (0, -1))},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_loader_is_not_believed_a_place_that_is_none(rank, warmable, lie):
    async with rank() as here:
        assert not await here.wanted(msgspec.structs.replace(warmable, **lie))
        assert here.told()[0].startswith("tables: not tuned: the loader told no ")


async def test_what_was_tuned_is_told_and_published(rank, warmable, tmp_path):
    shelf = Shelf()
    async with rank(shelf) as here, anyio.create_task_group() as tasks:
        assert await here.wanted(warmable)
        put(tmp_path / "root", TABLE, TABLE)
        tasks.start_soon(here.work)
        await here.made(warmable, Tuned(entries=80, hits=56, seconds=5.46))
        await told(here, "published")
        assert here.told() == (
            "tables: tuned 80 entries in 5.5 s",
            "tables: published to the shared stores",
        )
        tasks.cancel_scope.cancel()
    assert list(shelf.held) == [store_key(HASH, name) for name in NAMES]
    assert shelf.closed


async def test_what_a_store_did_not_take_is_not_called_published(rank, warmable, tmp_path):
    """Stores raise nothing of the kind: what failed is among their faults."""
    shelf = Shelf()
    shelf.faults = ("mooncake: the pool is full",)
    async with rank(shelf) as here, anyio.create_task_group() as tasks:
        await here.wanted(warmable)
        put(tmp_path / "root", TABLE, TABLE)
        tasks.start_soon(here.work)
        await here.made(warmable, Tuned(entries=80, seconds=5.46))
        await anyio.sleep(0.1)
        assert here.told() == (
            "tables: tuned 80 entries in 5.5 s",
            "store mooncake: the pool is full",
        )
        tasks.cancel_scope.cancel()


async def test_a_failure_to_tune_is_a_trouble(rank, warmable):
    async with rank(Shelf()) as here:
        await here.wanted(warmable)
        await here.made(warmable, Tuned(failure="no nvcc"))
        line = "tables: tuning failed, engines use defaults: no nvcc"
        assert here.told() == here.troubles() == (line,)


async def adopting(rank, warmable, *lines: Tuned, shelf: Shelf | None = None):
    """The life after one in which tuning ended so."""
    async with rank() as here:
        await here.wanted(warmable)
        for tuned in lines:
            await here.made(warmable, tuned)
        here.loaded("0a" * 16)
    again = Tables(here._record, stores=None if shelf is None else lambda: shelf)
    again.adopted("0a" * 16, makes=False)
    return again


async def test_a_failure_to_tune_is_one_until_tables_are_there(rank, warmable, tmp_path):
    line = "tables: tuning failed, engines use defaults: no nvcc"
    for _ in range(2):
        again = await adopting(rank, warmable, Tuned(failure="no nvcc"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(again.work)
            await anyio.sleep(0.1)
            assert again.told() == again.troubles() == (line,)
            tasks.cancel_scope.cancel()
    put(tmp_path / "root", TABLE, TABLE)
    again = Tables(tmp_path / "warmup.json")
    again.adopted("0a" * 16, makes=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(again.work)
        await told(again, "tables: found on disk, ")
        assert again.troubles() == ()
        tasks.cancel_scope.cancel()
    async with rank() as here:  # nor is it one of the load that follows
        assert not await here.wanted(warmable)
        here.loaded("0b" * 16)
    assert (await adopting(rank, warmable)).troubles() == ()


@pytest.mark.parametrize("tables", [[], [TABLE]], ids=["none", "one of two"])
async def test_a_life_that_adopts_tells_that_there_are_no_tables(rank, warmable, tmp_path, tables):
    put(tmp_path / "root", *tables)
    again = await adopting(rank, warmable)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(again.work)
        await told(again, "preloadctl release and preloadctl load have them made")
        tasks.cancel_scope.cancel()
    (line,) = again.told()
    assert line.startswith(f"tables: not there for all ranks, below {tmp_path / 'root'}: ")


async def test_one_that_adopts_tells_of_a_table_that_is_not_overwritten(rank, warmable, tmp_path):
    again = await adopting(rank, warmable)
    put(tmp_path / "root", TABLE, ELSEWHERE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(again.work)
        await told(again, "is not overwritten: remove it")
        assert again.troubles() == again.told()
        tasks.cancel_scope.cancel()


async def test_where_loads_have_nothing_tuned_the_next_life_tells_of_no_tables(rank, warmable):
    """The first engine does it, as in groups of several hosts."""
    again = await adopting(rank, msgspec.structs.replace(warmable, tunes=False))
    assert again.told() == ()
    again.adopted("0a" * 16, makes=True)
    assert "as before" in again.told()[0]


@pytest.fixture
def opening(monkeypatch) -> Callable:
    """`opening(act)`: `act` is done before each opening of the folder of tables."""
    opens = os.open

    def opening(act) -> None:
        def first(path, *more, **named):
            if str(path).endswith(HASH):
                act()
            return opens(path, *more, **named)

        monkeypatch.setattr(os, "open", first)

    return opening


async def test_what_a_look_finds_is_not_told_of_weights_that_came_meanwhile(
    rank, warmable, opening
):
    again = await adopting(rank, warmable)
    looks, ends = threading.Event(), threading.Event()

    def wait():
        looks.set()
        ends.wait(20)

    opening(wait)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(again.work)
        while not looks.is_set():  # noqa: ASYNC110 - a thread tells
            await anyio.sleep(0.01)
        assert not await again.wanted(Warmable(why_not="the weights are in host memory"))
        ends.set()
        await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()
    assert again.told() == ("tables: not tuned: the weights are in host memory",)


async def test_tables_that_cannot_be_read_are_not_said_to_be_missing(rank, warmable, opening):
    again = await adopting(rank, warmable)

    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    opening(fail)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(again.work)
        await told(again, "Input/output error")
        await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    assert again.told()[0].startswith("tables: as before, below ")


def fails(_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (fails, "[Errno 5] Input/output error"),
        (shutil.rmtree, "only 0 of 2 ranks have one now"),
        (lambda place: (place / str(NAMES[1])).unlink(), "only 1 of 2 ranks have one now"),
    ],
    ids=["it fails", "the folder is gone", "one is gone"],
)
async def test_what_is_lost_before_it_is_published_ends_nothing(
    rank, warmable, tmp_path, opening, act, why
):
    put(tmp_path / "root", TABLE, TABLE)
    shelf, looks = Shelf(), iter(range(9))
    again = await adopting(rank, msgspec.structs.replace(warmable, rank=0), shelf=shelf)
    opening(lambda: act(tmp_path / "root" / HASH) if next(looks) == len(NAMES) else None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(again.work)
        await told(again, f"tables: not published: {why}")
        await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    assert len(again.told()) == 2
    assert shelf.held == {}


@pytest.mark.parametrize("adopts", [False, True], ids=["found", "adopted"])
async def test_what_a_store_has_lost_it_gets_again(rank, warmable, tmp_path, adopts):
    first = msgspec.structs.replace(warmable, rank=0)
    put(tmp_path / "root", TABLE, TABLE)
    shelf = Shelf()
    async with rank(shelf) as here, anyio.create_task_group() as tasks:
        assert not await here.wanted(first)
        one = await adopting(rank, first, shelf=shelf) if adopts else here
        tasks.start_soon(one.work)
        await told(one, "tables: published to the shared stores")
        tasks.cancel_scope.cancel()
    assert shelf.held == {store_key(HASH, name): render(TABLE) for name in NAMES}


async def test_the_first_rank_gives_what_is_there_for_all(rank, warmable, tmp_path):
    put(tmp_path / "root", TABLE, TABLE)
    shelf = Shelf()
    async with rank(shelf) as here, anyio.create_task_group() as tasks:
        assert not await here.wanted(warmable)
        tasks.start_soon(here.work)
        await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()
    assert shelf.held == {}


async def test_what_is_found_replaces_what_is_damaged_in_a_store(rank, warmable, tmp_path):
    put(tmp_path / "root", TABLE, TABLE)
    shelf = Shelf()
    shelf.held = {store_key(HASH, name): b"{" for name in NAMES}
    async with rank(shelf) as here, anyio.create_task_group() as tasks:
        assert not await here.wanted(msgspec.structs.replace(warmable, rank=0))
        tasks.start_soon(here.work)
        await told(here, "tables: published to the shared stores")
        tasks.cancel_scope.cancel()
    assert shelf.held == {store_key(HASH, name): render(TABLE) for name in NAMES}


async def test_what_is_found_replaces_nothing_in_a_store(rank, warmable, tmp_path):
    put(tmp_path / "root", TABLE, TABLE)
    shelf = Shelf(dict.fromkeys(NAMES, OTHER))
    async with rank(shelf) as here, anyio.create_task_group() as tasks:
        assert not await here.wanted(msgspec.structs.replace(warmable, rank=0))
        tasks.start_soon(here.work)
        await told(here, "a store has other tables already")
        tasks.cancel_scope.cancel()
    assert set(shelf.held.values()) == {render(OTHER)}


async def test_a_store_that_takes_nothing_is_told(rank, warmable, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PUBLISH_S", 0.2)
    done, hangs = threading.Event(), threading.Event()
    shelf = Shelf(act=lambda: hangs.is_set() and done.wait(20))
    async with rank(shelf) as here, anyio.create_task_group() as tasks:
        await here.wanted(warmable)
        put(tmp_path / "root", TABLE, TABLE)
        hangs.set()
        tasks.start_soon(here.work)
        await here.made(warmable, Tuned(entries=1))
        await told(here, "not published: a store did not answer within 0.2 s")
        tasks.cancel_scope.cancel()
        done.set()


async def test_the_next_life_gives_the_tables_to_others(rank, warmable, tmp_path):
    async with rank() as here:
        await here.wanted(warmable)
        here.loaded("0a" * 16)
    put(tmp_path / "root", TABLE, TABLE)
    fields = {"config_hash": HASH, "dp_rank": 0, "rank": 1}
    async with rank() as again:
        kind = again.kind
        assert kind.resolve(fields) is None
        again.adopted("0a" * 16, makes=False)
        assert str(NAMES[1]).encode() in kind.resolve(fields)
        assert again.told() == (f"tables: as before, below {tmp_path / 'root'}",)
        assert list(again.tables_of(HASH)) == [str(name) for name in NAMES]
        assert again.tables_of("00" * 32) == {}


@pytest.mark.parametrize("content", [None, b"", b"noise", b'{"generation": "0a"}', b"[" * 9000])
async def test_a_record_that_is_none_is_nothing(rank, tmp_path, content):
    if content is not None:
        (tmp_path / "warmup.json").write_bytes(content)
    async with rank() as here:
        here.adopted("0a" * 16, makes=False)
        assert here.told() == ()


@pytest.mark.timeout(10)
async def test_a_pipe_in_the_place_of_the_record_is_not_waited_for(rank, tmp_path):
    os.mkfifo(tmp_path / "warmup.json")
    async with rank() as here:
        here.adopted("0a" * 16, makes=False)
        assert here.told() == ()


async def test_tables_of_other_weights_are_not_taken_for_these(rank, warmable):
    async with rank() as here:
        await here.wanted(warmable)
        here.loaded("0a" * 16)
    async with rank() as again:
        again.adopted("0b" * 16, makes=False)
        assert again.tables_of(HASH) == {}


async def test_peers_are_answered_from_the_stores_where_the_disk_has_none(rank, warmable):
    async with rank(Shelf({NAMES[0]: TABLE})) as here:
        await here.wanted(warmable)
        kind = here.kind
        fields = {"config_hash": HASH, "dp_rank": 0, "rank": 0}
        assert str(NAMES[0]).encode() in await anyio.to_thread.run_sync(kind.resolve, fields)
        assert list(here.tables_of(HASH)) == [str(NAMES[0])]


async def test_stores_that_cannot_be_used_end_a_start_and_no_adoption(tmp_path):
    def stores():
        raise ConfigError("there is no store 'fil'")

    here = Tables(tmp_path / "warmup.json", stores=stores)
    with pytest.raises(ConfigError):
        await here.open()
    with anyio.move_on_after(0.3):
        await here.work()
    assert here.told() == ("tables: shared stores: there is no store 'fil'",)
    here.close()


@pytest.mark.parametrize(
    ("tables", "why"),
    [([TABLE, MORE], "not of one tuning"), ([EMPTY, EMPTY], "is empty")],
    ids=["mixed", "empty"],
)
async def test_tables_of_a_peer_that_do_not_go_together_are_told(
    rank, warmable, tmp_path, tables, why
):
    async with rank(fetch=source(*tables)) as here:
        assert await here.wanted(warmable)
        (note,) = here.told()
    assert note.startswith("tables: not seeded (incompatible): ")
    assert why in note
    assert not (tmp_path / "root").exists()


async def test_what_a_peer_should_not_have_sent_is_no_error(rank, warmable):
    """A fetch judges; should it not, a load goes on all the same."""
    large = Table({"a": Entry("R", [0] * 1_000_000)}, H200)
    async with rank(fetch=source(large, large)) as here:
        assert await here.wanted(warmable)
        (note,) = here.told()
    assert "what a peer has cannot be installed" in note


async def test_a_folder_that_somebody_holds_delays_nobody(rank, warmable, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DISK_S", 0.2)
    put(tmp_path / "root", TABLE)
    with locked_folder(tmp_path / "root" / HASH):
        async with rank(fetch=source(TABLE, TABLE)) as here:
            since = time.monotonic()
            assert await here.wanted(warmable)
            assert time.monotonic() - since < 2
            (note,) = here.told()
    assert "the disk did not answer within 0.2 s" in note


async def test_a_disk_that_times_out_by_itself_is_told_in_its_own_words(
    rank, warmable, tmp_path, monkeypatch
):
    """As one of the network does, which may be long before it is waited for no longer."""
    opens = os.open

    def lost(path, *more, **named):
        if str(path).endswith(HASH):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(path))
        return opens(path, *more, **named)

    async with rank() as here:
        await here.wanted(warmable)
        monkeypatch.setattr(os, "open", lost)
        await here.rehearsed()
        (note,) = here.told()
    assert note.startswith("tables: not published: [Errno 110] Connection timed out: ")


async def test_a_store_that_times_out_by_itself_is_told_in_its_own_words(rank, warmable):
    def act():
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    async with rank(Shelf(act=act)) as here:
        await here.wanted(warmable)
        (note,) = here.told()
    assert note == "tables: shared stores: [Errno 110] Connection timed out"


async def test_a_store_with_what_is_bad_hides_none_that_follows(rank, warmable, tmp_path):
    shelves = [Shelf(dict.fromkeys(NAMES, table)) for table in (ELSEWHERE, TABLE)]
    workers = [Worker(str(n), lambda shelf=shelf: shelf, 2.0) for n, shelf in enumerate(shelves)]
    with Stores(workers) as stores:
        async with rank(stores) as here:
            assert not await here.wanted(warmable)
            assert here.told()[0].startswith("tables: installed from a shared store, ")
    assert [one.metadata for one in installed(tmp_path / "root")] == [H200, H200]


async def test_who_was_first_to_publish_stays(rank, warmable, tmp_path):
    """Some ranks with the tables of one tuning, and some with another's, would be worse."""
    shelf = Shelf({NAMES[0]: OTHER})
    async with rank(shelf) as here, anyio.create_task_group() as tasks:
        await here.wanted(warmable)
        put(tmp_path / "root", TABLE, TABLE)
        tasks.start_soon(here.work)
        await here.rehearsed()
        await told(here, "a store has other tables already")
        tasks.cancel_scope.cancel()
    assert shelf.held == {store_key(HASH, NAMES[0]): render(OTHER)}


async def test_the_last_of_the_ranks_publishes_for_all(rank, warmable, tmp_path):
    shelf = Shelf()
    async with rank(shelf) as here, anyio.create_task_group() as tasks:
        await here.wanted(warmable)
        folder.install(tmp_path / "root", HASH, {NAMES[1]: TABLE}, Existing.REPLACE)
        tasks.start_soon(here.work)
        await here.made(warmable, Tuned(entries=1))
        assert "tables: 1 of 2 ranks have one on this host" in here.told()[-1]
        tasks.cancel_scope.cancel()
    assert shelf.held == {}


@pytest.mark.parametrize("tables", [[TABLE, MORE], [EMPTY, EMPTY]], ids=["mixed", "empty"])
async def test_what_does_not_go_together_is_not_published(rank, warmable, tmp_path, tables):
    async with rank(Shelf()) as here:
        await here.wanted(warmable)
        put(tmp_path / "root", *tables)
        await here.rehearsed()
        assert any("tables: not published: " in line for line in here.told())
