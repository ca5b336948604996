"""A source with one table, whom its tests attack, and what a target asks it for."""

import socket
from contextlib import asynccontextmanager, closing
from functools import partial

import anyio
import pytest

from preloadd.domain.endpoint import Endpoint
from preloadd.domain.tokens import token, verify
from preloadd.rank.seeding.listener import Listener
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import TableName
from preloadd.warmup.seeding.tables import TableKind, TableWanted
from preloadd.warmup.table import Entry, Table
from preloadd.warmup.verdict import FIELDS

HERE = "127.0.0.1"
HASH = "ab" * 32
NAME = TableName(0, 3)
SECRET = "plt_a-secret-that-nobody-may-read-in-any-log"
METADATA = dict.fromkeys(FIELDS, "1.0")


class Source(Listener):
    """Where to find it, and the tokens that it takes."""

    def __init__(self, port, kinds):
        super().__init__(HERE, port, kinds, self._good)
        self.where = Endpoint(HERE, port)
        self.tokens = [a_token(SECRET)]

    async def _good(self, shown: bytes) -> bool:
        return verify(self.tokens, shown, 0.0) is not None


def a_token(secret):
    return token("n", secret, bytes(16), now=0.0, expires=None)


@pytest.fixture
def port():
    with closing(socket.socket()) as sock:
        sock.bind((HERE, 0))
        return sock.getsockname()[1]


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
