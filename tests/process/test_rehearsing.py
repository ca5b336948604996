"""A real rank that ends while an engine of its own warms up: its next life adopts, and says so.

The loader has weights as the native builder has them, and the engine starts for ever.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Builder, Warmup
from preloadd.rank.warmup.rehearsal import MODULE
from tests.checkout import ROOT
from tests.manager import Manager
from tests.waiting import eventually

pytestmark = [pytest.mark.slow]

STARTING = "warming up: starting"
LOADER = """
import sys
from preloadd.domain.settings import Builder
from preloadd.loader import __main__ as loader, pipeline
pipeline._BUILDERS[Builder.VLLM] = pipeline._load_native
sys.exit(loader.main())
"""


@pytest.fixture
def pid(tmp_path: Path) -> Path:
    """The file in which the engine's number is."""
    return tmp_path / "pid"


@pytest.fixture
def rehearsing(manage: Callable[..., Manager], model: Path, tmp_path: Path, pid: Path) -> Manager:
    """A rank whose engine warms up for as long as it may."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$2" = {MODULE} ]; then echo $$ > {pid}; echo started; exec sleep 600; fi\n'
        f"exec env PYTHONPATH={ROOT} {sys.executable} -c '{LOADER}'\n"
    )
    python.chmod(0o755)
    rank = {"python": str(python), "warmup": Warmup(trust_bundles=True)}
    made = manage(model, rank=rank, builder=Builder.VLLM)
    made.start()
    made.until_phase(STARTING)
    return made


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_life_serves_at_once_and_says_that_the_warm_up_was_cut_off(
    rehearsing, pid, number
):
    assert rehearsing.status().state is State.LOADING
    rehearsing.signal(number)
    rehearsing.ended()
    engine = Path("/proc", pid.read_text().strip())
    eventually(lambda: not engine.exists(), lambda: f"end of {engine}")
    for _ in range(2):
        rehearsing.start()
        rehearsing.ready()
        status = rehearsing.status()
        assert (status.state, status.adopted, rehearsing.phases) == (State.SERVING, True, [])
        (line,) = status.warmup
        assert "the warm-up of these weights was cut off as their daemon ended" in line
        assert "the first engine does it" in line
        assert "preloadctl release tests, then preloadctl load tests" in line
        rehearsing.attach().close()
        rehearsing.kill()


def test_an_operator_who_releases_ends_the_warm_up(rehearsing, pid):
    engine = Path("/proc", pid.read_text().strip())
    ran = rehearsing.ctl("release", "tests")
    assert ran.returncode == 0, ran
    assert "is released" in ran.stdout
    assert not engine.exists()
    assert (rehearsing.status().state, rehearsing.arena) == (State.RELEASED, set())
