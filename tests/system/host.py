"""A machine on which preloadd is installed, in the words of its tests: groups, ranks, weights."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from preloadd.protocol.messages import StatusTold
from preloadd.transport.status import ask_status
from tests.system.machine import PATIENCE_S, Machine

HEALTH = "http://127.0.0.1:9470/healthz"
LIMITS = "/run/systemd/system/preloadd@.service.d/limits.conf"


DRAFTED = 'builder = "vllm"\nengine_args = { sc = { method = "mtp", num_speculative_tokens = 1 } }'
"""In a group's file: ranks for a draft as well."""


class Host:
    """Groups are files, ranks are units; `machine` is for everything else."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    # -- what is asked of it --

    def write_group(self, name: str, gpus: Iterable[str], more: str = "", **restart: float) -> None:
        """Define a group, as an administrator does. By default it is restarted after 0.2 s."""
        lines = [f'name = "{name}"', f"gpus = {json.dumps(list(gpus))}", more, "[restart]"]
        lines += [f"{key} = {value}" for key, value in {"pause_s": 0.2, **restart}.items()]
        self.machine.write(f"/etc/preloadd/groups.d/{name}.toml", "\n".join([*lines, ""]))
        self.machine.systemctl("daemon-reload")

    def write_real_group(self, name: str, gpus: Sequence[str], **restart: float) -> None:
        """Define a group that shares the model at /srv/model out among its ranks."""
        sizes = f'model = "/srv/model"\nparallel = {{ tensor_parallel_size = {len(gpus)} }}'
        self.write_group(name, gpus, sizes, **restart)

    def behave(self, instance: str, **behaviour: Any) -> None:
        """Tell the stand-in what to do from its next start on."""
        self.machine.write(f"/etc/stand-in/{instance}", json.dumps(behaviour))

    def limit(self, **settings: str) -> None:
        """Change settings of every rank's service, such as its time-outs."""
        lines = [f"{key}={value}" for key, value in settings.items()]
        self.machine.write(LIMITS, "\n".join(["[Service]", *lines, ""]))
        self.machine.systemctl("daemon-reload")

    def start(self) -> None:
        """Start everything, and wait until it serves."""
        self.machine.systemctl("start", "preloadd.target")

    def kill(self, instance: str, signal: str = "KILL") -> None:
        """Send a signal to a rank, and to no child of it."""
        self.machine.systemctl("kill", "--kill-whom=main", f"--signal={signal}", rank(instance))

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What came of an administrator's command."""
        return self.machine.run("preloadctl", *arguments, check=False)

    # -- what is seen of it --

    def state(self, unit: str) -> str:
        """Whether a unit is active."""
        return self.machine.show(unit, "ActiveState")

    def states(self, instances: Iterable[str]) -> set[str]:
        """In what states these ranks are."""
        return {self.state(rank(instance)) for instance in instances}

    def pid(self, instance: str) -> int:
        """The rank's process, as the machine numbers it; 0 if there is none."""
        return int(self.machine.show(rank(instance), "MainPID"))

    def pids(self, instances: Iterable[str]) -> list[int]:
        """The processes of several ranks."""
        return [self.pid(instance) for instance in instances]

    def weights(self, instances: Iterable[str]) -> list[str]:
        """What each stand-in says it serves: a random name drawn at each load."""
        return [self.machine.show(rank(instance), "StatusText") for instance in instances]

    def told_by(self, instance: str) -> StatusTold:
        """What a rank tells of itself."""
        return ask_status(self.machine.path(f"/run/preloadd/{instance}/rank.sock"), timeout=5.0)

    def lives(self, instances: Iterable[str]) -> list[tuple[int, str]]:
        """Process and generation of each rank: equal if nothing has touched it."""
        told = [self.told_by(instance) for instance in instances]
        return [(each.pid, each.generation) for each in told]

    def health(self) -> tuple[int, dict[str, Any]]:
        """What the supervisor answers: status and content."""
        ask = ["curl", "--silent", "--show-error", "--write-out", "\\n%{http_code}", HEALTH]
        body, _, code = self.machine.run(*ask).stdout.rpartition("\n")
        return int(code), json.loads(body)

    def stored(self, instance: str) -> int:
        """How many descriptors the manager keeps for a rank."""
        return int(self.machine.show(rank(instance), "NFileDescriptorStore"))

    def told(self, instance: str, what: str) -> list[float]:
        """When a stand-in `began` or `ended`, in monotonic seconds, once for each life."""
        lines = [text.split() for text in self.machine.messages(rank(instance))]
        return [float(words[2]) for words in lines if words[:2] == [what, "at"]]

    def until(self, seen: Callable[[], object], what: str) -> float:
        """Wait until `seen` holds; how many seconds that took."""
        start = time.monotonic()
        while not seen():
            if time.monotonic() - start > PATIENCE_S:
                units = self.machine.systemctl("status", "preloadd*", check=False).stdout
                raise AssertionError(f"no {what} in {PATIENCE_S:g} s\n{units}")
            time.sleep(0.02)
        return time.monotonic() - start

    def until_back(self, instances: Iterable[str], old: Iterable[int]) -> float:
        """Wait until all ranks serve in other processes than the `old` ones; how long that took."""
        # In this order: a state is that of the processes that were there before, or of later ones.
        none = {0, *old}

        def back() -> bool:
            return not none & set(self.pids(instances)) and self.states(instances) == {"active"}

        return self.until(back, f"return of {', '.join(instances)}")


def rank(instance: str) -> str:
    """The unit of an instance."""
    return f"preloadd@{instance}.service"


def group(name: str) -> str:
    """The unit of a group."""
    return f"preloadd-group@{name}.target"


Boot = Callable[..., AbstractContextManager[Host]]
"""Boots a machine with preloadd, which is gone after the `with`: what it takes says the fixture."""
