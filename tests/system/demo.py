"""The demo model as two groups, and engines of another user that answer from them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

from bench.demo.model import make_model
from tests.system import installed
from tests.system.host import Boot, Host

MODEL = "/srv/demo"
A = ("CPU-0", "CPU-1")
B = ("CPU-2",)
ANSWER = "The capital of France is Paris."

ENGINES = 'u engine - "an inference engine" /var/lib/engine\nm engine inference\n'


def group(name: str, devices: tuple[str, ...], *, more: str = "") -> dict[str, str]:
    """The file of a group that divides the model into stages, for engines to use."""
    lines = [f'model = "{MODEL}"', f"gpus = {json.dumps(devices)}"]
    lines += [f"parallel.pipeline_parallel_size = {len(devices)}", 'access.groups = ["inference"]']
    return {f"/etc/preloadd/groups.d/{name}.toml": "\n".join([*lines, more, ""])}


@contextmanager
def booted(boot: Boot, *, more: str = "") -> Iterator[Host]:
    """A machine that was booted with preloadd enabled, and two groups, `a` and `b`.

    `more` are further lines of each group's file.
    """
    with boot(
        program=installed.REAL,
        unit="multi-user.target",
        prepare="systemd-sysusers engine.conf; systemctl enable preloadd.target",
        files={
            "/usr/lib/sysusers.d/engine.conf": ENGINES,
            **group("a", A, more=more),
            **group("b", B, more=more),
        },
        binds=[(make_model(), MODEL)],
    ) as host:
        yield host


class Engine:
    """A service that asks one question again and again of the weights of some devices."""

    def __init__(self, host: Host, devices: tuple[str, ...]) -> None:
        self._host = host
        self.unit = f"engine-{'-'.join(devices)}.service"
        self._answers = f"/run/{self.unit}.answers"
        lines = [
            "[Service]",
            f"ExecStart=preloadd-python {installed.TESTS}/inside/engine.py {MODEL} "
            + " ".join(devices),
            "Type=exec",
            "User=engine",
            "StateDirectory=engine",
            f"StandardOutput=append:{self._answers}",
            "",
        ]
        host.machine.write(f"/run/systemd/system/{self.unit}", "\n".join(lines))
        host.machine.systemctl("daemon-reload")

    @property
    def pid(self) -> int:
        """Its process; 0 once it has ended."""
        return int(self._host.machine.show(self.unit, "MainPID"))

    def answers(self) -> list[dict[str, Any]]:
        """All so far."""
        text = self._host.machine.path(self._answers).read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def until_answered(self) -> dict[str, Any]:
        """Wait for an answer to a question that is asked from now on; it must be right."""
        now = time.monotonic()
        # That one may have been asked before.
        seen = lambda: [each for each in self.answers() if each["at"] > now][1:]  # noqa: E731
        self._host.until(lambda: seen() or not self.pid, f"answer of {self.unit}")
        assert self.pid, "\n".join(self._host.machine.messages(self.unit))
        found = seen()[0]
        assert found["answer"] == ANSWER
        return found

    @property
    def longest_silence(self) -> float:
        """Seconds between one answer and the next, at most."""
        times = [answer["at"] for answer in self.answers()]
        return max(later - before for before, later in pairwise(times))

    def __enter__(self) -> Self:
        self._host.machine.systemctl("start", self.unit)
        return self

    def __exit__(self, *_: object) -> None:
        self._host.machine.systemctl("stop", self.unit)
