"""Seeding with vLLM's own code at the other end, in both directions.

`PRELOADD_TEST_VLLM_SEEDING` names a folder with the package of a vLLM that has it (0.33), installed
or only unpacked. Nothing of that is imported in this process.
"""

import hashlib
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from preloadd.domain.endpoint import Endpoint
from preloadd.domain.tokens import token, verify
from preloadd.rank.seeding.client import fetch
from preloadd.rank.seeding.listener import Listener
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import TableName
from preloadd.warmup.seeding.kinds import Outcome
from preloadd.warmup.seeding.tables import TableKind, TableWanted, install_all
from preloadd.warmup.table import Entry, Table
from preloadd.warmup.verdict import FIELDS
from tests.engines.vllm_seeding_peer import FINGERPRINT
from tests.ports import free_port

TREE = os.environ.get("PRELOADD_TEST_VLLM_SEEDING", "")
PEER = Path(__file__).with_name("vllm_seeding_peer.py")
SEED = "vllm/model_executor/model_loader/weight_cache/seed.py"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        not TREE and not os.environ.get("CI"), reason="PRELOADD_TEST_VLLM_SEEDING names no vLLM"
    ),
]

HERE = "127.0.0.1"
SECRET = "plt_a-secret-of-both"
HASH = hashlib.sha256(FINGERPRINT.encode()).hexdigest()
NAME = TableName(0, 3)
KEY = "('fp8_gemm', 'CublasFp8GemmRunner', ((1, 128, 4096), (), (-1,)), (torch.bfloat16,))"
POLICY = ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"]
TABLE = Table(
    {KEY: Entry("CublasFp8GemmRunner", 3, (POLICY,)), "ü": Entry("R", [1, [2]])},
    dict.fromkeys(FIELDS, "1.0"),
    {"a-product": {"x": 1.5}},
)
WANTED = TableWanted(HASH, NAME, TABLE.metadata)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def port():
    assert Path(TREE, SEED).is_file(), f"{TREE} has no {SEED}"
    return free_port()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def stored(root):
    (path,) = folder.install(root, HASH, {NAME: TABLE}, Existing.KEEP)
    return path.read_bytes()


def peer(*args):
    return [sys.executable, str(PEER), TREE, *map(str, args)]


@contextmanager
def vllm_source(port, root, secret=SECRET):
    argv = peer("source", HERE, port, secret, root)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as source:
        assert source.stdout.readline() == b"listening\n"
        yield Endpoint(HERE, port)
        source.stdin.close()


async def test_a_table_of_vllm_comes_here_as_it_was(port, root, stored, tmp_path):
    with vllm_source(port, root) as source:
        seeded = await fetch(source, WANTED, SECRET, within=10)
        assert (seeded.outcome, seeded.why) == (Outcome.FETCHED, "")
        assert seeded.value.intact
        assert install_all(tmp_path / "there", HASH, {NAME: seeded.value}).outcome == "installed"
    assert (tmp_path / "there" / HASH / str(NAME)).read_bytes() == stored


async def test_what_vllm_answers_otherwise_is_understood(port, root, stored):
    with vllm_source(port, root) as source:
        other = TableWanted(HASH, TableName(0, 4), TABLE.metadata)
        assert (await fetch(source, other, SECRET, within=10)).outcome is Outcome.MISSING
        seeded = await fetch(source, WANTED, "wrong", within=10)
        assert seeded.outcome is Outcome.REFUSED
        assert "does not accept this rank's token" in seeded.why
        bad = TableWanted("..", NAME, TABLE.metadata)
        assert "this hash" in (await fetch(source, bad, SECRET, within=10)).why
        elsewhere = TableWanted(HASH, NAME, {**TABLE.metadata, "gpu": "another"})
        seeded = await fetch(source, elsewhere, SECRET, within=10)
        assert seeded.outcome is Outcome.INCOMPATIBLE
        # It has survived all of that.
        assert (await fetch(source, WANTED, SECRET, within=10)).outcome is Outcome.FETCHED


async def test_what_vllm_would_take_of_itself_is_not_taken_here(port, root, stored):
    path = root / HASH / str(NAME)
    with vllm_source(port, root) as source:
        for bad in (b'{"x": 5}', b'{"_records": [], "_metadata": {}}', b'{"_metadata": null}'):
            path.write_bytes(bad)
            seeded = await fetch(source, WANTED, SECRET, within=10)
            assert seeded.outcome is Outcome.INCOMPATIBLE


async def vllm_fetches(port, there, *, rank=3, secret=SECRET):
    argv = peer("target", HERE, port, secret, there, rank)
    return (await anyio.run_process(argv)).stdout.decode()


@pytest.fixture
def listener(port, root):
    good = token("n", SECRET, bytes(16), now=0.0, expires=None)
    kind = TableKind([partial(folder.stored, root)])

    async def admits(shown: bytes) -> bool:
        return verify([good], shown, 0.0) is not None

    return Listener(HERE, port, [kind], admits)


async def test_a_table_from_here_comes_to_vllm(port, listener, stored, tmp_path):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve)
        await listener.port.tried.wait()
        told = await vllm_fetches(port, tmp_path / "there")
        assert "Adopted remote flashinfer_autotune seed" in told
        tasks.cancel_scope.cancel()
    there = folder.tables(tmp_path / "there", HASH)
    assert [(found.name, found.fault, found.table.intact) for found in there] == [(NAME, "", True)]
    assert there[0].table.entries == TABLE.entries
    assert there[0].table.records == TABLE.records


async def test_vllm_understands_what_is_answered_here(port, listener, stored, tmp_path):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve)
        await listener.port.tried.wait()
        assert "status miss" in await vllm_fetches(port, tmp_path / "there", rank=4)
        assert "status error" in await vllm_fetches(port, tmp_path / "there", secret="wrong")
        tasks.cancel_scope.cancel()
    there = folder.tables(tmp_path / "there", HASH) if (tmp_path / "there").exists() else []
    assert there == []
