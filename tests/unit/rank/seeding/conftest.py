"""A source with one table, whom its tests attack, and what a target asks it for."""

from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from preloadd.warmup import folder
from preloadd.warmup.merge import Existing
from preloadd.warmup.seeding.tables import TableKind, TableWanted
from preloadd.warmup.table import Entry, Table
from tests.ports import free_port
from tests.unit.rank.seeding.source import HASH, METADATA, NAME, Source


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def table():
    """A table that fits METADATA."""
    return Table({"a": Entry("R", 1)}, METADATA)


@pytest.fixture
def root(tmp_path, table):
    """Where the source keeps it."""
    folder.install(tmp_path / "root", HASH, {NAME: table}, Existing.KEEP)
    return tmp_path / "root"


@pytest.fixture
def wanted():
    """That table."""
    return TableWanted(HASH, NAME, METADATA)


@pytest.fixture
def kind(root):
    """What the source answers with."""
    return TableKind([partial(folder.stored, root)])


@pytest.fixture
def serving(port, kind):
    """A context with a source that listens; its value is the source."""

    @asynccontextmanager
    async def serving(*kinds):
        source = Source(port, kinds or [kind])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.serve)
            await source.port.tried.wait()
            yield source
            tasks.cancel_scope.cancel()

    return serving
