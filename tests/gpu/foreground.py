"""`preloadd run` as its users start it, with what it says."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from preloadd.errors import PreloadError
from preloadd.protocol.messages import StatusTold
from preloadd.transport.status import ask_status

PATIENCE_S = 60.0


class Group:
    """A group in the foreground; `sockets` is the folder of its ranks."""

    def __init__(self, model: Path, folder: Path, environ: Mapping[str, str], *flags: str) -> None:
        self.sockets = folder / "s"
        self._told = folder / "told"
        command = [sys.executable, "-m", "preloadd", "run", "--model", str(model), *flags]
        command += ["--weight-cache-socket-dir", str(self.sockets)]
        with self._told.open("wb") as told:
            self.process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=told, stderr=told
            )

    @property
    def told(self) -> str:
        """All that it and its ranks said."""
        return self._told.read_text(errors="replace")

    def ended(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(PATIENCE_S)

    def status(self, instance: str) -> StatusTold:
        """What a rank tells of itself."""
        return ask_status(self.sockets / instance / "rank.sock", timeout=5.0)

    def serving(self, *instances: str) -> list[StatusTold]:
        """What its ranks tell, once all of them serve."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(PreloadError):
                told = [self.status(each) for each in instances]
                if all(each.state == "serving" for each in told):
                    return told
            time.sleep(0.02)
        raise AssertionError(f"it does not serve (exit {self.process.poll()}):\n{self.told}")


@contextmanager
def running(model: Path, folder: Path, environ: Mapping[str, str], *flags: str) -> Iterator[Group]:
    """A group for the length of the block; ended politely."""
    group = Group(model, folder, environ, *flags)
    try:
        yield group
    finally:
        group.process.terminate()
        group.ended()
