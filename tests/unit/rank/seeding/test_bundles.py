"""Compiled bundles from one cache root to another: a real listener, and a real store between."""

import anyio
import pytest

from preloadd.rank.seeding.client import fetch
from preloadd.warmup.bundles.exchange import obtain, publish
from preloadd.warmup.bundles.install import Installed
from preloadd.warmup.seeding.compile_cache import CompileKind, CompileWanted
from preloadd.warmup.seeding.kinds import Outcome
from preloadd.warmup.stores.opening import open_stores
from tests.bundles import AOT, IDENTITY, PLAIN, contents, write
from tests.unit.rank.seeding.source import HASH, SECRET

pytestmark = pytest.mark.anyio


@pytest.fixture
def source(tmp_path):
    """The cache root of the source."""
    write(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def stores(tmp_path):
    """What both sides use."""
    (tmp_path / "shared").mkdir()
    with open_stores([f"file:{tmp_path / 'shared'}"], {}) as made:
        yield made


async def test_a_target_installs_what_its_source_compiled(serving, source, stores, tmp_path):
    kind, target = CompileKind(), tmp_path / "target"
    kind.offer(HASH, publish(source, [AOT, PLAIN], IDENTITY, stores, now=0.0))
    async with serving(kind) as listener:
        seeded = await fetch(listener.where, CompileWanted(HASH, IDENTITY), SECRET, within=5)
    assert seeded.outcome is Outcome.FETCHED
    installed = await anyio.to_thread.run_sync(
        lambda: obtain(target, seeded.value, stores, trusted=True, now=0.0)
    )
    assert installed == Installed((PLAIN, AOT), (PLAIN, AOT))
    assert contents(target / "torch_compile_cache") == contents(source / "torch_compile_cache")


async def test_what_is_of_other_engines_is_not_even_fetched(serving, source, stores):
    kind = CompileKind()
    kind.offer(HASH, publish(source, [AOT, PLAIN], IDENTITY, stores, now=0.0))
    async with serving(kind) as listener:
        wanted = CompileWanted(HASH, IDENTITY | {"cuda": "12.8"})
        seeded = await fetch(listener.where, wanted, SECRET, within=5)
    assert (seeded.outcome, seeded.value) == (Outcome.INCOMPATIBLE, None)
    assert "cuda: there '13.0', here '12.8'" in seeded.why


async def test_a_source_that_has_not_compiled_it_says_so(serving):
    async with serving(CompileKind()) as listener:
        seeded = await fetch(listener.where, CompileWanted(HASH, IDENTITY), SECRET, within=5)
    assert seeded.outcome is Outcome.MISSING
