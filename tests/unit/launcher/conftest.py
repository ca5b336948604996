"""A stage for groups: stand-in ranks that follow a script, and a run that ends by itself."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from preloadd.domain.settings import Deadlines, ModelSettings, RankSettings
from preloadd.launcher.ending import Ending
from preloadd.launcher.group import Launch, run_group
from preloadd.launcher.progress import LineDisplay
from tests.checkout import ROOT

STAND_IN = Path(__file__).with_name("stand_in.py")
DRIVE = Path(__file__).with_name("drive.py")
PATIENCE_S = 20.0

Step = list[Any]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code, what was shown, and after how many seconds it was over."""

    code: int
    shown: str
    seconds: float


class Stage:
    """Scripts the stand-ins below `folder`, runs groups of them, and knows how they lived."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket_dir = folder / "s"
        self.socket_dir.mkdir(mode=0o700)
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    def script(self, instance: str, *lives: Sequence[Step]) -> None:
        (self.folder / f"{instance}.json").write_text(json.dumps(lives))

    def lives(self, instance: str) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            text = (self.folder / f"{instance}.log").read_text()
            return [json.loads(line) for line in text.splitlines()]
        return []

    def command(self, settings: RankSettings) -> list[str]:
        return [sys.executable, str(STAND_IN), str(self.folder), settings.instance]

    def settings(self, instance: str, *, stop: float = 10.0) -> RankSettings:
        return RankSettings(
            group="tiny",
            instance=instance,
            socket_dir=str(self.socket_dir),
            derived=False,
            model=ModelSettings("/models/tiny", "org/tiny"),
            deadlines=Deadlines(stop=stop),
        )

    def launch(self, *instances: str, stop: float = 10.0, **more: Any) -> Launch:
        ranks = tuple(self.settings(instance, stop=stop) for instance in instances)
        return Launch(ranks, self.command, self.environ, **more)

    def run(
        self,
        launch: Launch,
        *,
        until: Callable[[str], bool] | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> Outcome:
        """Run until the group ends by itself, or `until` says of what was shown that it may end.

        `then` is called once when that is so.
        """
        return anyio.run(self._run, launch, until, then)

    async def _run(self, launch, until, then) -> Outcome:
        stream = io.StringIO()
        display = LineDisplay(stream)
        ending = Ending(display)

        async def watch() -> None:
            while not until(stream.getvalue()):  # noqa: ASYNC110 what is awaited are processes
                await anyio.sleep(0.005)
            then()
            ending.because("the test has seen enough", 0)

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                if until is not None:
                    tasks.start_soon(watch)
                await run_group(launch, ending, display)
                seconds = anyio.current_time() - ending.since
                tasks.cancel_scope.cancel()
        return Outcome(ending.code, stream.getvalue(), seconds)


@pytest.fixture
def stage(socket_dir: Path) -> Stage:
    return Stage(socket_dir)


class Launcher:
    """A launcher process with what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.shown = ""

    def wait_for(self, text: str) -> None:
        while text not in self.shown:
            line = self.process.stdout.readline()
            assert line, f"the launcher ended without {text!r}: {self.shown}"
            self.shown += line

    def end(self) -> int:
        rest, _ = self.process.communicate(timeout=PATIENCE_S)
        self.shown += rest
        return self.process.returncode


@pytest.fixture
def drive(stage):
    @contextmanager
    def started(*engine: str, before: Sequence[str] = (), **fields: str) -> Iterator[Launcher]:
        temporary = stage.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        given = [*(f"{name}={value}" for name, value in fields.items()), *engine]
        driver = [*before, sys.executable, str(DRIVE)]
        command = [*driver, str(stage.folder), str(stage.socket_dir), *given]
        environ = {**stage.environ, "TMPDIR": str(temporary), "HF_HOME": str(stage.folder / "hf")}
        with subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                yield Launcher(process)
            finally:
                process.kill()

    return started
