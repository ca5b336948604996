"""Compiled code of a rank: what it has in mind, gives, fetches, and tells, with real folders."""

import errno
import json
import os
import shutil
import threading
from contextlib import asynccontextmanager

import anyio
import pytest

from preloadd.engine import bundles
from preloadd.protocol.messages import Warmable
from preloadd.rank.warmup.claim import NAME, Claim
from preloadd.rank.warmup.compiled_code import CompiledCode
from preloadd.transport.threads import settle
from preloadd.warmup.bundles.manifest import BadBundle
from preloadd.warmup.seeding.compile_cache import BUNDLE, KIND, WHOLE
from preloadd.warmup.seeding.kinds import Outcome, Seeded, Unfit
from preloadd.warmup.stores.opening import open_stores
from tests.bundles import IDENTITY, contents, write

pytestmark = pytest.mark.anyio

HASH = "ab" * 32


@pytest.fixture
def told(root):
    return Warmable(
        config_hash=HASH, identity=IDENTITY | {"cache_root": str(root), "engine_args": "[]"}
    )


@pytest.fixture
def stores(tmp_path):
    (tmp_path / "shared").mkdir()
    with open_stores([f"file:{tmp_path / 'shared'}"], {}) as made:
        yield made
        settle(20)  # what was begun in a thread still asks them


def code(stores=None, *, trusted=True, fetch=None):
    return CompiledCode(trusted=trusted, stores=lambda: stores, fetch=fetch, wall=lambda: 0.0)


async def until(holds):
    with anyio.fail_after(20):
        while not holds():  # noqa: ASYNC110 - nothing tells
            await anyio.sleep(0.01)


class Hanging:
    """Paths that end with `end` are not opened until `let`; `asked` once one is to be."""

    def __init__(self, monkeypatch, end) -> None:
        opens, self._asked, self._answers = os.open, threading.Event(), threading.Event()

        def hanging(path, *more, **named):
            if str(path).endswith(end):
                self._asked.set()
                self._answers.wait(20)
            return opens(path, *more, **named)

        monkeypatch.setattr(os, "open", hanging)

    async def asked(self) -> None:
        await until(self._asked.is_set)

    def let(self) -> None:
        """Have them opened, and wait until whoever was to has done what it does with them."""
        self._answers.set()
        for thread in threading.enumerate():
            if thread.name == "asking the disk or a store":
                thread.join(20)


@asynccontextmanager
async def working(one, word):
    """`one` at work, until it tells of something with that word."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.work)
        await until(lambda: any(word in line for line in one.told()))
        yield
        tasks.cancel_scope.cancel()


async def rehearsed(one, told, root):
    """`one` after an engine has compiled."""
    assert not await one.found(told, within=5.0)
    write(root)
    await one.rehearsed()


async def of_another_host(stores, told, root):
    """What has given its code to the stores; `root` is then as on a host that has none."""
    source = code(stores)
    await rehearsed(source, told, root)
    async with working(source, "given to others"):
        pass
    root.rename(root.with_name("elsewhere"))
    root.mkdir()
    return source


def answering(source):
    """What a source's rank answers, as a target hears it."""

    async def fetch(wanted, *, within):
        assert within == 5.0
        payload = source.kind.resolve(wanted.fields)
        if payload is None:
            return Seeded(Outcome.MISSING, "it has none")
        try:
            return Seeded(Outcome.FETCHED, value=wanted.judged(json.loads(payload)))
        except Unfit as error:
            return Seeded(Outcome.INCOMPATIBLE, str(error))

    return fetch


async def test_what_an_engine_compiled_is_given_to_stores_and_had_by_another_host(
    root, told, stores, tmp_path
):
    source = code(stores)
    await rehearsed(source, told, root)
    async with working(source, "given to others"):
        pass
    made = contents(root / "torch_compile_cache")
    # Another host has the same path.
    root.rename(tmp_path / "elsewhere")
    root.mkdir()

    target = code(stores, fetch=answering(source))
    assert await target.found(told, within=5.0)
    assert contents(root / "torch_compile_cache") == made
    assert "installed from the source, 2 folders" in target.told()[0]
    # And gives it to others itself, as after a load that found it there.
    async with working(target, "given to others"):
        assert target.kind.resolve({"config_hash": HASH}) == source.kind.resolve(
            {"config_hash": HASH}
        )
    again = code(stores)
    assert await again.found(told, within=5.0)
    assert "as before, 2 folders" in again.told()[0]
    assert (target.as_before, again.as_before) == (False, True)


async def test_an_engine_that_had_all_from_a_source_makes_nothing_new_of_it(root, told, stores):
    source = await of_another_host(stores, told, root)
    target = code(stores, fetch=answering(source))
    assert await target.found(told, within=5.0)
    await target.rehearsed()
    assert "installed from the source, 2 folders" in target.told()[0]


async def test_without_trust_nothing_is_given_or_fetched_but_kept_in_mind(root, told, stores):
    async def fetch(*_, **__):
        raise AssertionError("a source was asked")

    one = code(stores, trusted=False, fetch=fetch)
    await rehearsed(one, told, root)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.work)
        await until((root / "preloadd-bundles.json").exists)
        tasks.cancel_scope.cancel()
    assert one.kind.resolve({"config_hash": HASH}) is None
    assert one.answer_of(HASH) == one.bundle_of(HASH) == {}
    again = code(trusted=False, fetch=fetch)
    assert await again.found(told, within=5.0)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"cuda": "12.8"}, "not seeded (incompatible): it was compiled for other engines: cuda"),
        ({}, "not installed: it is in no store"),
    ],
)
async def test_what_is_not_to_be_had_is_told(root, told, stores, tmp_path, change, line):
    source = await of_another_host(stores, told, root)
    shutil.rmtree(tmp_path / "shared")
    (tmp_path / "shared").mkdir()

    other = Warmable(config_hash=HASH, identity=told.identity | change)
    target = code(stores, fetch=answering(source))
    assert not await target.found(other, within=5.0)
    assert line in target.told()[0]
    target.let_go()


async def test_without_a_store_or_a_bundle_engines_compile(root, told, stores):
    target = code(None, fetch=answering(code()))
    assert not await target.found(told, within=5.0)
    assert "there is no store" in target.told()[0]
    target.let_go()
    target = code(stores, fetch=answering(code()))
    assert not await target.found(told, within=5.0)
    assert "not seeded (missing)" in target.told()[0]
    target.let_go()
    assert not await target.found(Warmable(config_hash=HASH), within=5.0)
    await target.rehearsed()
    assert target.told() == ()


async def test_a_source_is_not_asked_when_there_is_no_time_left(root, told, stores):
    target = code(stores, fetch=pytest.fail)
    assert not await target.found(told, within=0.0)
    assert "took all the time for that" in target.told()[0]
    target.let_go()


async def test_after_a_restart_it_is_given_again(root, told, stores):
    first = code(stores)
    await rehearsed(first, told, root)
    async with working(first, "given to others"):
        pass
    second = code(stores)
    second.adopted(told)
    async with working(second, "given to others"):
        assert second.kind.resolve({"config_hash": HASH})


@pytest.mark.slow
async def test_what_a_store_has_lost_it_gets_again_once_somebody_was_told_of_it(
    root, told, stores, tmp_path, monkeypatch
):
    monkeypatch.setattr("preloadd.rank.warmup.compiled_code._LOOK_S", 0.05)
    source = code(stores)
    await rehearsed(source, told, root)
    async with working(source, "given to others"):
        payload = json.loads(source.kind.resolve({"config_hash": HASH}))
        (emptied,) = tmp_path.rglob("bundle.tar")
        shutil.rmtree(emptied.parent)
        source.kind.resolve({"config_hash": HASH})
        await until(lambda: stores.find(payload["key"]))


@pytest.fixture
def looking(monkeypatch):
    """Looks follow one another at once."""
    monkeypatch.setattr("preloadd.rank.warmup.compiled_code._LOOK_S", 0.02)


def asked_of(source, config_hash=HASH):
    return source.kind.resolve({"config_hash": config_hash})


async def test_what_is_damaged_in_a_store_is_whole_again_once_somebody_was_told_of_it(
    root, told, stores, tmp_path, looking
):
    source = code(stores)
    await rehearsed(source, told, root)
    async with working(source, "given to others"):
        (file,) = tmp_path.rglob("bundle.tar")
        whole = file.read_bytes()
        file.write_bytes(whole[:100])
        assert asked_of(source)
        await until(lambda: file.read_bytes() == whole)


async def test_what_is_nowhere_any_more_is_not_told_of_until_it_is_there_again(
    root, told, stores, tmp_path, looking
):
    source = code(stores)
    await rehearsed(source, told, root)
    async with working(source, "given to others"):
        root.rename(tmp_path / "away")
        assert asked_of(source)
        await anyio.sleep(0.2)
        # A store has it still.
        assert asked_of(source)
        assert "given to others, " in source.told()[-1]
        shutil.rmtree(next(tmp_path.glob("shared/*")))
        await until(lambda: asked_of(source) is None)
        assert "not given to others: " in source.told()[-1]
        (tmp_path / "away").rename(root)
        await until(lambda: asked_of(source))
        assert list(tmp_path.rglob("bundle.tar"))


async def test_a_store_that_was_away_at_first_gets_it_once_somebody_asks(
    root, told, stores, tmp_path, looking
):
    shared = tmp_path / "shared"
    shared.rename(tmp_path / "away")
    source = code(stores)
    await rehearsed(source, told, root)
    async with working(source, "not given to others"):
        assert asked_of(source) is None
        (tmp_path / "away").rename(shared)
        await until(lambda: asked_of(source))


async def test_who_is_told_of_a_configuration_of_before_finds_that_one(
    root, told, stores, tmp_path, looking
):
    source = code(stores)
    await rehearsed(source, told, root)
    async with working(source, "given to others"):
        before = json.loads(asked_of(source))
        other = Warmable(config_hash="cd" * 32, identity=told.identity | {"cuda": "12.8"})
        assert not await source.found(other, within=5.0)
        write(root, {"torch_compile_cache/9876543210/rank_0_0/backbone/graph": b"x"})
        await source.rehearsed()
        await until(lambda: asked_of(source, "cd" * 32))
        shutil.rmtree(next(tmp_path.glob("shared/*")))
        assert asked_of(source)
        await until(lambda: stores.find(before["key"]))
        assert json.loads(asked_of(source)) == before
        # What engines of this host are given is of the one that is loaded.
        (answer,) = source.answer_of("cd" * 32).values()
        assert answer == asked_of(source, "cd" * 32)
        assert source.answer_of(HASH) == {}


async def test_what_is_given_while_other_weights_come_is_not_taken_for_theirs(
    root, told, stores, monkeypatch
):
    source = code(stores)
    await rehearsed(source, told, root)
    folder = Hanging(monkeypatch, root.name)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.work)
        await folder.asked()
        other = Warmable(config_hash="cd" * 32)
        assert not await source.found(other, within=5.0)
        folder.let()
        await until(lambda: source.kind.offered(HASH))
        tasks.cancel_scope.cancel()
    assert source.answer_of("cd" * 32) == {}
    assert source.told() == ()


async def test_a_bundle_that_no_engine_uses_is_told(root, told, stores, monkeypatch):
    source = await of_another_host(stores, told, root)
    target = code(stores, fetch=answering(source))
    assert await target.found(told, within=5.0)
    other = root / "torch_compile_cache" / "9876543210"
    other.mkdir(mode=0o700)
    (other / "artifact").write_bytes(b"x")
    monkeypatch.setattr("preloadd.rank.warmup.compiled_code._LOOK_S", 0.05)
    async with working(target, "installed but never used"):
        pass


async def test_what_a_look_finds_is_not_told_of_weights_that_came_meanwhile(
    root, told, stores, monkeypatch
):
    source = await of_another_host(stores, told, root)
    target = code(stores, fetch=answering(source))
    assert await target.found(told, within=5.0)
    async with working(target, "given to others"):
        pass
    shutil.rmtree(root / "torch_compile_cache")
    folder = Hanging(monkeypatch, root.name)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(target.work)
        await folder.asked()
        assert not await target.found(Warmable(config_hash=HASH), within=5.0)
        folder.let()
        await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    assert target.told() == ()


async def test_groups_that_compile_in_one_place_do_not_take_each_others_code(root, told):
    one, other = code(), code()
    assert not await one.found(told, within=5.0)
    await rehearsed(other, told, root)
    assert "another group compiles there" in other.told()[0]
    await one.rehearsed()
    assert "2 folders made by an engine" in one.told()[0]
    again = code()
    assert not await again.found(
        Warmable(config_hash=HASH, identity=told.identity | {"cuda": "1"}), within=5.0
    )
    await again.rehearsed()


async def test_what_another_group_compiled_before_is_not_taken_for_ones_own(root, told, stores):
    other = code()
    assert not await other.found(told, within=5.0)

    async def fetch(wanted, *, within):
        write(root)
        await other.rehearsed()
        return Seeded(Outcome.MISSING, "it has none")

    one = code(stores, fetch=fetch)
    assert not await one.found(
        Warmable(config_hash=HASH, identity=told.identity | {"cuda": "1"}), within=5.0
    )
    write(root, {"torch_compile_cache/9876543210/rank_0_0/backbone/graph": b"x"})
    await one.rehearsed()
    assert "1 folders made by an engine" in one.told()[0]


async def test_where_it_is_not_known_what_was_there_nothing_is_taken_for_ones_own(
    root, told, monkeypatch
):
    opens = os.open

    def failing(path, *more, **named):
        if str(path) == str(root):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opens(path, *more, **named)

    one = code()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing)
        assert not await one.found(told, within=5.0)
    write(root)
    await one.rehearsed()
    (line,) = one.told()
    assert line.startswith("compiled code: [Errno 5] Input/output error")
    one.let_go()


async def test_a_lock_that_comes_once_it_is_given_up_is_not_kept(root, told, monkeypatch):
    one, lock = code(), Hanging(monkeypatch, NAME)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: one.found(told, within=5.0))
        await lock.asked()
        tasks.cancel_scope.cancel()
    one.let_go()
    lock.let()
    assert (root / NAME).exists()
    with Claim() as other:
        assert other.take(root)


async def test_an_engine_on_the_host_takes_it_over(root, told, tmp_path):
    one = code()
    await rehearsed(one, told, root)
    asked = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.work)
        await until(lambda: one.answer_of(HASH))
        tasks.cancel_scope.cancel()

    def ask(kind, limit):
        asked.append(kind)
        return {KIND: one.answer_of, WHOLE: one.bundle_of}[kind](HASH)

    here = told.identity | {"engine_args": "as this engine was told"}
    assert "is there already" in bundles.take(ask, HASH, lambda: here)
    assert asked == [KIND]
    # An engine in a container has the same path, and other files.
    kept = ask(WHOLE, 1 << 30)[BUNDLE]
    answer = one.answer_of(HASH)
    made = contents(root / "torch_compile_cache")
    shutil.rmtree(root / "torch_compile_cache")

    def of_daemon(kind, limit):
        return answer if kind == KIND else {BUNDLE: kept}

    assert "2 new folders" in bundles.take(of_daemon, HASH, lambda: here)
    assert contents(root / "torch_compile_cache") == made
    with pytest.raises(Unfit, match="cuda: there"):
        bundles.take(of_daemon, HASH, lambda: here | {"cuda": "12.8"})
    shutil.rmtree(root / "torch_compile_cache")
    damaged = kept[:-1] + b"x"
    with pytest.raises(BadBundle):
        bundles.take(
            lambda kind, _: answer if kind == KIND else {BUNDLE: damaged}, HASH, lambda: here
        )
    assert not contents(root / "torch_compile_cache")
    assert bundles.take(lambda *_: {}, HASH, lambda: here) == ""
