"""A group that warms up with a real engine, and what engines take over from its daemon."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import anyio
import msgspec
import pytest

from preloadd.domain.placement import Parallel
from preloadd.linux import seqpacket
from preloadd.linux.process import spawn
from preloadd.protocol import codec
from preloadd.protocol.messages import LINK, Order
from preloadd.rank.gate import Gate
from preloadd.rank.warmup.rehearsal import Outcome, Rehearsal, Rehearsed, rehearse
from preloadd.warmup.names import TableName
from preloadd.warmup.table import Entry, Table, render
from preloadd.warmup.verdict import FIELDS
from tests.engines.vllm import harness
from tests.engines.vllm.stage import SMALL, Rank, loaded, settings_of
from tests.tuned import H200

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

EAGER = "--enforce-eager"


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def serving(vllm_python, socket_dir):
    """`serving(model, *arguments)`: ranks that serve it, in a block; `before` is done first."""

    @asynccontextmanager
    async def serving(model, *arguments, parallel=None, before=lambda _: None, warm=None):
        environ = harness._serving(vllm_python) | {"PYTHONPATH": str(harness.ROOT)}
        group = settings_of(model, socket_dir, vllm_python, *arguments, parallel=parallel)
        made = [(Rank(one, warm or {}), await loaded(one, environ)) for one in group]
        before(made[0][0])
        async with AsyncExitStack() as serves:
            for rank, generation in made:
                await serves.enter_async_context(rank.serving(generation))
            yield [rank for rank, _ in made]

    return serving


def environ_of(python: Path, cache: Path, *, compiles: bool = False) -> dict[str, str]:
    """The environment of a rank whose engines have that cache."""
    environ = harness.environ(python, VLLM_CACHE_ROOT=str(cache), PYTHONPATH=str(harness.ROOT))
    del environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    if compiles:
        del environ["TORCH_COMPILE_DISABLE"]
    return environ


def of_this_engine(gate: Gate) -> list[int]:
    """The processes that have the pass of this gate."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if gate.key.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


class Rehearsing:
    """A rehearsal of the first of these ranks, looked at while it runs."""

    def __init__(self, ranks: Sequence[Rank], gate: Gate, environ: dict[str, str]) -> None:
        self.most = [0 for _ in ranks]
        self.done = None
        self._ranks, self._gate, self._environ = ranks, gate, environ

    async def run(self) -> None:
        first = self._ranks[0]
        rehearsal = Rehearsal.of(first.settings, self._environ)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._look)
            self.done = await rehearse(
                rehearsal,
                first.settings,
                self._gate,
                first.fellows,
                lambda _: None,
                within=first.settings.warmup.deadline,
            )
            first.service.open_gate()
            tasks.cancel_scope.cancel()
        print(self.done, self.done.made)

    async def _look(self) -> None:
        while True:
            now = [len(rank.service._leases) for rank in self._ranks]
            self.most = list(map(max, self.most, now))
            await anyio.sleep(0.05)


async def test_others_wait_until_a_group_has_compiled(serving, zoo, engine, vllm_python, tmp_path):
    model, gates, cache = zoo("llama"), [], tmp_path / "cache"
    other = engine()
    async with serving(model, before=lambda rank: gates.append(rank.service.close_gate())) as ranks:
        environ = environ_of(vllm_python, cache, compiles=True)
        rehearsing = Rehearsing(ranks, gates[0], environ)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rehearsing.run)
            sockets = ranks[0].path.parents[1]
            told = await anyio.to_thread.run_sync(partial(other.attach, model, sockets))
            assert "(loading): warming up" in told.reason
        assert (rehearsing.done.outcome, rehearsing.most) == (Outcome.DONE, [1])
        compiled = cache / "torch_compile_cache"
        assert rehearsing.done.made.compiled
        assert all((compiled / name).is_dir() for name in rehearsing.done.made.compiled)
        assert ranks[0].service.status().lease_count == 0
        assert of_this_engine(gates[0]) == []
        told = await anyio.to_thread.run_sync(partial(other.attach, model, sockets))
        assert not told.reason


async def test_all_ranks_of_a_group_take_part(serving, zoo, vllm_python, tmp_path):
    gates = []
    async with serving(
        zoo("llama"),
        EAGER,
        parallel=Parallel(tensor=2),
        before=lambda rank: gates.append(rank.service.close_gate()),
    ) as ranks:
        rehearsing = Rehearsing(ranks, gates[0], environ_of(vllm_python, tmp_path / "cache"))
        await rehearsing.run()
        assert (rehearsing.done.outcome, rehearsing.most) == (Outcome.DONE, [1, 1])
        assert of_this_engine(gates[0]) == []


async def test_what_vllm_refuses_leaves_the_rank_serving(serving, zoo, vllm_python, tmp_path):
    environ = environ_of(vllm_python, tmp_path / "cache")
    async with serving(zoo("llama"), EAGER) as ranks:
        rank = ranks[0]
        without = await refused(rank, environ | {"VLLM_PLUGINS": ""})
        assert "preloadctl plugin enable PYTHON" in without.why
        model = rank.settings.model
        longer = replace(model, engine_args=(*model.engine_args, "--max-model-len=100000"))
        rank.settings = replace(rank.settings, model=longer)
        why = (await refused(rank, environ)).why
        assert "vLLM refuses the model or its arguments" in why
        assert "max_model_len" in why


async def refused(rank: Rank, environ: dict[str, str]) -> Rehearsed:
    """A rehearsal that fails before its engine attaches; others are let in afterwards."""
    rehearsing = Rehearsing([rank], rank.service.close_gate(), environ)
    await rehearsing.run()
    assert (rehearsing.done.outcome, rehearsing.most) == (Outcome.FAILED, [0])
    status = rank.service.status()
    assert (status.state, status.detail) == ("serving", "")
    return rehearsing.done


async def test_an_engine_ends_with_its_rank(serving, zoo, vllm_python, tmp_path):
    """It is not to hold a GPU for ever because its rank was killed."""
    gate = Gate()
    async with serving(zoo("llama"), EAGER) as ranks:
        settings = ranks[0].settings
        rehearsal = Rehearsal.of(settings, environ_of(vllm_python, tmp_path / "cache"))
        log = (tmp_path / "log").open("wb")
        ours, theirs = seqpacket.pair()
        with closing(ours), closing(theirs), log:
            child = spawn(
                rehearsal.argv,
                environ={**rehearsal.environ, "PRELOADD_REHEARSAL": gate.key},
                fds=[(LINK, theirs.fileno())],
                parent_death_signal=signal.SIGTERM,
                stdout=log.fileno(),
                stderr=log.fileno(),
            )
            theirs.close()
            try:
                seqpacket.send(ours, codec.encode(Order(settings=settings)))
                deadline = time.monotonic() + 60
                while not (seen := len(ranks[0].service._leases)):
                    assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                    await anyio.sleep(0.05)
                assert seen == 1
                ours.close()
                with anyio.fail_after(30):
                    await anyio.wait_readable(child)
                    while of_this_engine(gate):  # noqa: ASYNC110
                        await anyio.sleep(0.05)
            finally:
                child.close()


def asked_for(told: list[str], metadata: dict[str, str] | None) -> dict:
    """What a daemon has that has a table for whatever it is asked for, and notes that."""

    def find(config_hash: str) -> dict[str, bytes]:
        told.append(config_hash)
        return {str(TableName(0, 0)): render(Table({"('x', ": Entry("R", 1)}, metadata))}

    return {"flashinfer_autotune": find}


@pytest.mark.parametrize("fits", [True, False])
async def test_an_engine_takes_over_tables_of_its_own_configuration(
    serving, zoo, vllm_python, tmp_path, fits
):
    flashinfer = find_spec("flashinfer")
    if flashinfer is None and not os.environ.get("CI"):
        pytest.skip("there is no FlashInfer")
    asked: list[str] = []
    warm = asked_for(asked, None if fits else H200)
    async with serving(zoo("llama"), EAGER, warm=warm) as ranks:
        root = tmp_path / "tables"
        given = {
            "words": [f"--model={zoo('llama')}", *SMALL, EAGER],
            "attaching": harness.attaching(ranks[0].path.parents[1], fallback=False),
            "flashinfer": str(Path(flashinfer.origin).parents[1]),
            "settings": msgspec.json.encode(ranks[0].settings).decode(),
        }
        environ = harness.environ(
            vllm_python, VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR=str(root), PYTHONPATH=str(harness.ROOT)
        )
        ended = await anyio.to_thread.run_sync(
            partial(
                subprocess.run,
                [vllm_python, "-m", "tests.engines.vllm.taking", json.dumps(given)],
                cwd=harness.ROOT,
                env=environ,
                capture_output=True,
                text=True,
                timeout=120,
            )
        )
        print(ended.stdout, ended.stderr)
        assert ended.returncode == 0
        told = json.loads(ended.stdout.rpartition("told ")[2].splitlines()[0])
        loader = told["loader"]
        assert asked == [told["engine"]] == [loader["config_hash"]]
        assert (loader["root"], loader["ranks"], loader["tunes"]) == (str(root), [[0, 0]], False)
        assert (tuple(loader["metadata"]), loader["why_not"]) == (FIELDS, "")
        assert (loader["untuned"], loader["untuned on older"]) == (False, True)
        path = root / told["engine"] / str(TableName(0, 0))
        if fits:
            assert path.read_bytes() == warm["flashinfer_autotune"]("")[str(TableName(0, 0))]
            assert "1 tables of FlashInfer from the daemon" in ended.stderr + ended.stdout
        else:
            assert not path.exists()
            why = "rank0.json was tuned in another environment: "
            assert why in ended.stderr + ended.stdout
