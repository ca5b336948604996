"""What a real rank does about tables; its loader is real too, but for what tunes (see
`tests.tuning_loader`), which in the last test is FlashInfer itself, on the CPU.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest

from preloadd.domain.endpoint import Endpoint
from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Deadlines, Seeding, Warmup
from preloadd.rank.seeding.client import fetch
from preloadd.warmup.names import OVERRIDE, TableName
from preloadd.warmup.seeding.kinds import Outcome
from preloadd.warmup.seeding.tables import TableWanted
from preloadd.warmup.table import parse
from tests import waiting
from tests.checkout import ROOT
from tests.checkpoints import SHARDS
from tests.manager import Manager
from tests.tuned import H200
from tests.tuning_loader import TABLE
from tests.waiting import eventually

pytestmark = [pytest.mark.slow]

SECRET = "plt_a-secret-that-nobody-may-read-in-any-log"
NAME = TableName(0, 0)

HANGING = """
import os
import sys

def hang(event, arguments):
    if event == "open" and str(arguments[0]).startswith({disk!r}) and os.path.exists({fifo!r}):
        os.close(os.open({fifo!r}, os.O_RDONLY))

sys.addaudithook(hang)
"""
"""What a disk does in a rank that imports this first: who opens what is on it waits for ever, while
there is a FIFO."""


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(SECRET)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The interpreter of loaders: it runs that of the tests, whatever module it is told."""
    path = tmp_path / "python"
    path.write_text(
        f"#!/bin/sh\nexec env PYTHONPATH={ROOT} {sys.executable} -m tests.tuning_loader\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def tuning(manage, model, python, tmp_path) -> Callable[..., Manager]:
    """A rank that is started, whose loader tunes as `tuner` says into `root`."""

    def tuning(tuner: str, root: str = "tables", *, ready: bool = True, **rank) -> Manager:
        settings = {"warmup": Warmup(autotune=True), "python": python} | rank
        manager = manage(model, rank=settings)
        manager.environ |= {"TUNER": tuner, OVERRIDE: str(tmp_path / root)}
        manager.start()
        if ready:
            manager.ready()
        return manager

    return tuning


@pytest.fixture
def hanging(tuning, tmp_path, port, tokens) -> tuple[Manager, Path]:
    """A rank that gives tables to others, and the FIFO for its disk to hang."""
    place = Endpoint("127.0.0.1", port)
    manager = tuning("stand-in", seeding=Seeding(listen=place, token_file=tokens))
    fifo, first = tmp_path / "hangs", tmp_path / "first"
    first.mkdir()
    (first / "sitecustomize.py").write_text(
        HANGING.format(disk=str(tmp_path / "tables"), fifo=str(fifo))
    )
    manager.environ["PYTHONPATH"] = f"{first}:{ROOT}"
    manager.kill()
    return manager, fifo


def table(root: Path) -> Path:
    (path,) = root.rglob(str(NAME))
    return path


def ask(port: int, config_hash: str, within: float = 5.0):
    """The table as another host gets it."""
    wanted = TableWanted(config_hash, NAME, H200)

    async def asked():
        return await fetch(Endpoint("127.0.0.1", port), wanted, SECRET, within=within)

    return anyio.run(asked)


def test_tables_are_tuned_before_a_rank_serves_and_found_the_next_time(tuning, tmp_path):
    first = tuning("stand-in")
    assert first.phases[-2:] == ["warming", "tuning"]
    assert first.status().warmup[0].startswith("tables: tuned 1 entries in ")
    assert parse(table(tmp_path / "tables").read_bytes(), "it").entries == TABLE.entries
    second = tuning("fails")
    assert second.status().warmup[0].startswith("tables: found on disk, ")
    assert "tuning" not in second.phases


@pytest.mark.parametrize(
    ("tuner", "told"),
    [
        ("fails", "FlashInfer kept its defaults for 7 of 14 sizes"),
        ("crashes", f"the loader was killed by signal {11} while it tuned"),
    ],
)
def test_a_rank_serves_however_tuning_ends(tuning, tuner, told):
    manager = tuning(tuner)
    status = manager.status()
    assert status.state is State.SERVING
    assert status.warmup == (f"tables: tuning failed, engines use defaults: {told}",)
    assert told in status.detail
    with manager.attach().arena.chunk(0) as mapped:
        assert len(mapped)


def test_a_failure_to_tune_is_told_by_the_next_life_as_well(tuning):
    manager = tuning("fails")
    before = manager.status()
    manager.restart()
    after = manager.status()
    assert (after.adopted, after.warmup) == (True, before.warmup)
    assert before.warmup[0] in after.detail


def test_one_that_hangs_is_given_up(tuning):
    manager = tuning("hangs", warmup=Warmup(autotune=True, deadline=1.0))
    assert "it took more than 1 s: the loader was ended" in manager.status().detail
    assert manager.loaders() == []


def test_one_that_is_silent_is_given_up(tuning):
    manager = tuning("hangs", deadlines=Deadlines(silence=2.0, stop=1.0))
    assert "no progress for 2 s while warming: it was ended" in manager.status().detail


def test_what_one_host_has_tuned_another_has_from_their_store(tuning, tmp_path):
    warmup = Warmup(autotune=True, stores=(f"file:{tmp_path / 'shared'}",))
    (tmp_path / "shared").mkdir(mode=0o700)
    source = tuning("stand-in", "first", warmup=warmup)
    eventually(
        lambda: "tables: published to the shared stores" in source.status().warmup,
        lambda: str(source.status().warmup),
    )
    other = tuning("fails", "second", warmup=warmup)
    (line,) = other.status().warmup
    assert line.startswith("tables: installed from a shared store, ")
    assert table(tmp_path / "second").read_bytes() == table(tmp_path / "first").read_bytes()


@pytest.mark.parametrize("lives", ["loads", "adopts"])
def test_a_store_that_was_emptied_gets_what_is_on_the_disk(tuning, tmp_path, lives):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    warmup = Warmup(autotune=True, stores=(f"file:{shared}",))
    manager = tuning("stand-in", "first", warmup=warmup)
    eventually(lambda: list(shared.rglob(str(NAME))), lambda: str(manager.status().warmup))
    kept = table(shared).read_bytes()
    if lives == "loads":
        manager.signal(signal.SIGTERM)
        manager.ended()
        table(shared).unlink()
        manager = tuning("fails", "first", warmup=warmup)
        assert manager.status().warmup[0].startswith("tables: found on disk, ")
    else:
        manager.kill()
        table(shared).unlink()
        manager.start()
        manager.ready()
        assert manager.status().adopted
    eventually(lambda: list(shared.rglob(str(NAME))), lambda: str(manager.status().warmup))
    assert table(shared).read_bytes() == kept
    other = tuning("fails", "second", warmup=warmup)
    assert other.status().warmup[0].startswith("tables: installed from a shared store, ")


def test_what_one_host_has_tuned_another_has_from_it(tuning, tmp_path, port, tokens):
    place = Endpoint("127.0.0.1", port)
    tuning("stand-in", "first", seeding=Seeding(listen=place, token_file=tokens))
    other = tuning("fails", "second", seeding=Seeding(source=place, token_file=tokens))
    (line,) = other.status().warmup
    assert line.startswith("tables: installed from a peer, ")
    assert table(tmp_path / "second").read_bytes() == table(tmp_path / "first").read_bytes()


def test_an_adopted_generation_is_not_tuned_for_and_its_table_given_at_once(
    tuning, tmp_path, port, tokens
):
    place = Endpoint("127.0.0.1", port)
    manager = tuning("stand-in", seeding=Seeding(listen=place, token_file=tokens))
    config_hash = table(tmp_path / "tables").parent.name
    assert ask(port, config_hash).outcome is Outcome.FETCHED
    manager.environ["TUNER"] = "crashes"
    manager.restart()
    assert manager.status().adopted
    assert ask(port, config_hash).value.entries == TABLE.entries
    assert manager.status().warmup == (f"tables: as before, below {tmp_path / 'tables'}",)


def test_a_port_that_is_taken_is_told_and_hinders_nobody(tuning, port, tokens):
    with closing(socket.create_server(("127.0.0.1", port))):
        place = Endpoint("127.0.0.1", port)
        manager = tuning("stand-in", seeding=Seeding(listen=place, token_file=tokens))
        eventually(
            lambda: f"others cannot be seeded at 127.0.0.1:{port}" in manager.status().detail,
            lambda: manager.status().detail,
        )
        assert manager.status().state is State.SERVING


def test_a_source_that_is_not_there_delays_for_as_long_as_is_allowed(tuning, port, tokens):
    place = Endpoint("127.0.0.1", port)
    seeding = Seeding(source=place, token_file=tokens, within=0.5)
    manager = tuning("stand-in", seeding=seeding)
    tuned, note = manager.status().warmup
    assert tuned.startswith("tables: tuned 1 entries")
    assert note.startswith("tables: not seeded (unreachable): ")


def test_a_store_that_is_misspelled_ends_the_start(tuning):
    warmup = Warmup(autotune=True, stores=("fil:/srv",))
    manager = tuning("stand-in", ready=False, warmup=warmup)
    assert manager.ended() == 78
    assert "did you mean 'file'?" in manager.log


def test_where_it_is_switched_off_nothing_is_tuned_and_that_is_told(tuning, tmp_path):
    manager = tuning("crashes", warmup=Warmup(autotune=False))
    assert manager.status().warmup == ("tables: not tuned, which is switched off",)
    assert not (tmp_path / "tables").exists()


def stopped(manager: Manager) -> int:
    """The exit status of a rank that is asked to end, and does so at once."""
    manager.signal(signal.SIGTERM)
    return manager.ended(timeout=5)


def test_a_rank_whose_disk_hangs_serves_and_ends_when_it_is_asked_to(hanging, tmp_path, port):
    manager, fifo = hanging
    config_hash = table(tmp_path / "tables").parent.name
    manager.start()
    manager.ready()
    assert ask(port, config_hash).outcome is Outcome.FETCHED
    os.mkfifo(fifo)
    assert ask(port, config_hash, within=0.5).outcome is Outcome.UNREACHABLE
    with manager.attach().arena.chunk(0) as mapped:
        assert len(mapped)
    assert stopped(manager) == 0
    fifo.unlink()
    manager.start()
    manager.ready()
    assert manager.status().adopted


def test_a_load_that_waits_for_a_disk_ends_when_it_is_asked_to(hanging, model):
    manager, fifo = hanging
    os.mkfifo(fifo)
    (model / SHARDS[0]).touch()
    manager.start()
    manager.until_phase("warming")
    assert stopped(manager) == 0
    assert manager.loaders() == []


@pytest.mark.skipif(
    find_spec("flashinfer") is None and not os.environ.get("CI"), reason="no FlashInfer here"
)
@pytest.mark.timeout(600)
def test_flashinfer_itself_tunes_in_a_loader_of_a_rank(tuning, tmp_path, monkeypatch):
    """It takes long to import."""
    monkeypatch.setattr(waiting, "PATIENCE_S", 240.0)
    manager = tuning("flashinfer")
    (line,) = manager.status().warmup
    assert line.startswith("tables: tuned 21 entries in ")
    found = parse(table(tmp_path / "tables").read_bytes(), "it")
    assert (found.metadata, found.ops, found.intact) == (H200, {"fp8_gemm": 21}, True)
    (again,) = tuning("flashinfer").status().warmup
    assert again.startswith("tables: found on disk, ")
