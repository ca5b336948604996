"""The real units on a host with a GPU and a booted systemd: what weights survive, and how fast.

    python3 -m tests.gpu.systemd [--gib 32] [--folder /var/tmp] [--json PATH]

As root. Prints one table; the exit status is 1 if a promise is broken, 2 without a GPU or systemd.
Everything is as a package installs it, sandbox and generator included; an engine of another user
computes throughout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from bench.gpu.report import Report
from preloadd.errors import PreloadError
from preloadd.protocol.messages import StatusTold
from tests.gpu import device
from tests.gpu.inside import words
from tests.gpu.sandbox import DRIVER, devices
from tests.system import installed
from tests.system.host import Host, rank
from tests.system.machine import NoMachine, Plan, booted

HERE = Path(__file__).parent
MODEL = "/srv/weights"
SITE = "/opt/site"
ANSWERS = "/run/engine.answers"
UNIT = "/usr/lib/systemd/system/preloadd@.service"
CODE = "/usr/lib/preloadd/preloadd"
TENSORS = 1000
READY_S = 0.5
LOAD_S = 280.0
MIB = 1 << 20
PROGRAMS = ("usr/libexec/preloadd/preloadd", "usr/bin/preloadctl", "usr/bin/preloadd-python")

USERS = 'u engine - "an inference engine" /var/lib/engine\nm engine inference\n'
GROUP = """model = "{model}"
gpus = ["{gpu}"]
memory = "cuda"
access.groups = ["inference"]
restart.pause_s = {pause}
restart.burst = 1000
"""
ENGINE = """[Service]
Type=exec
User=engine
ExecStart=preloadd-python -m tests.gpu.inside.service {model}
Environment=LD_LIBRARY_PATH={libraries}
StateDirectory=engine
TimeoutStopSec=60
StandardOutput=append:{answers}
"""


def main() -> int:
    """Make weights, boot, do to them what happens in a year, and tell."""
    given = _arguments()
    if why := device.missing():
        print(f"there is no GPU here: {why}", file=sys.stderr)
        return 2
    report = Report("systemd", given.json)
    report.facts |= device.meter().facts()
    with ExitStack() as owned:
        scratch = Path(owned.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        scratch.chmod(0o755)
        began = time.monotonic()
        count = _weights(scratch / "weights", int(given.gib * 2**30))
        report.tell(f"weights written in {time.monotonic() - began:.1f} s")
        gpu = device.meter().uuid
        before = used_mib()
        try:
            host = owned.enter_context(machine(scratch, gpu))
        except NoMachine as error:
            print(f"no systemd can be booted here: {error}", file=sys.stderr)
            return 2
        trial = Trial(host, gpu, report, before, words.checksum(TENSORS, count))
        try:
            trial.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, what was found is told
            report.failed("trial", f"{type(error).__name__}: {error}")
            print("\n".join(host.machine.messages(rank(gpu))[-30:]), file=sys.stderr)
            print("\n".join(host.machine.messages("engine.service")[-30:]), file=sys.stderr)
    report.show()
    return 1 if report.bad else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, default=32)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _weights(folder: Path, nbytes: int) -> int:
    folder.mkdir()
    count = words.write_checkpoint(folder, nbytes, TENSORS, threads=8)
    for path in folder.iterdir():
        path.chmod(0o644)
    return count


# -- the machine --


@contextmanager
def machine(scratch: Path, gpu: str) -> Iterator[Host]:
    """A booted machine with the GPU, on which preloadd is installed and one group is defined."""
    package = installed.install(scratch / "package", installed.REAL)
    paths = ["/usr/lib/preloadd", SITE, installed.TESTS]
    for program in PROGRAMS:
        path = package / program
        text = path.read_text()
        path.write_text(
            text.replace("PYTHONPATH=/usr/lib/preloadd", f"PYTHONPATH={':'.join(paths)}")
        )
    for inside, text in {
        "/usr/lib/sysusers.d/engine.conf": USERS,
        "/etc/default/preloadd": f"LD_LIBRARY_PATH={_libraries()}\n",
        "/etc/preloadd/groups.d/weights.toml": GROUP.format(model=MODEL, gpu=gpu, pause=0.5),
        "/etc/systemd/system/engine.service": ENGINE.format(
            model=MODEL, libraries=_libraries(), answers=ANSWERS
        ),
    }.items():
        path = package / inside.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    nodes = [
        f"mkdir -p $(dirname {path}) && mknod -m 666 {path} c {os.major(number)} {os.minor(number)}"
        for path, number in devices()
    ]
    binds = [
        *installed.PYTHON_BINDS,
        (HERE, f"{installed.TESTS}/tests/gpu"),
        (scratch / "weights", MODEL),
    ]
    if DRIVER.is_dir():
        binds.append((DRIVER, str(DRIVER)))
    if site := _site():
        binds.append((site, SITE))
    prepare = "; ".join([installed.PREPARE, "systemd-sysusers engine.conf", *nodes])
    with booted(Plan(layers=[package], binds=binds, prepare=prepare)) as made:
        yield Host(made)


def _libraries() -> str:
    """Where the driver's libraries are, for services, which get no environment from here."""
    given = os.environ.get("LD_LIBRARY_PATH", "")
    return given or (f"{DRIVER}/lib64" if DRIVER.is_dir() else "")


def _site() -> Path | None:
    """The folder of packages that are not where the interpreter looks by itself."""
    found = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return next((entry for entry in found if (entry / "msgspec").is_dir()), None)


# -- the device, as one sees it who keeps nothing of it open --


def _smi(*query: str) -> list[str]:
    command = ["nvidia-smi", f"--id={device.meter().uuid}", *query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def used_mib() -> int:
    """Device memory in use."""
    return int(_smi("--query-gpu=memory.used")[0])


def contexts() -> list[int]:
    """Processes with a context, whoever's."""
    return [int(text) for text in _smi("--query-compute-apps=pid") if text.isdigit()]


# -- what is done --


@dataclass
class Engine:
    """The service that computes, and what it said."""

    host: Host
    right: int

    def lines(self) -> list[dict[str, Any]]:
        """All that it said since the machine was booted."""
        text = self.host.machine.path(ANSWERS).read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def answers(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Its sums from some time on."""
        return [line for line in self.lines() if line.get("at", -1.0) >= since]

    def until_answered(self, since: float, count: int = 2) -> None:
        """Wait for sums that were asked for from `since` on."""
        self.host.until(lambda: len(self.answers(since)) >= count or not self.pid, "answer")
        assert self.pid, "\n".join(self.host.machine.messages("engine.service")[-30:])

    @property
    def pid(self) -> int:
        """Its process; 0 once it has ended."""
        return int(self.host.machine.show("engine.service", "MainPID"))

    @property
    def verified(self) -> list[dict[str, Any]]:
        """Every look at all bytes."""
        return [line for line in self.lines() if "verified" in line]

    def __enter__(self) -> Self:
        self.host.machine.systemctl("start", "engine.service")
        return self

    def __exit__(self, *_: object) -> None:
        # It verifies once more, and may need its time.
        self.host.machine.systemctl("stop", "--no-block", "engine.service")
        self.host.until(lambda: not self.pid, "end of the engine")


class Trial:
    """One machine, one rank, and what becomes of its weights."""

    def __init__(self, host: Host, gpu: str, report: Report, before: int, right: int) -> None:
        self.host, self.gpu, self.report = host, gpu, report
        self.unit = rank(gpu)
        self.before = before
        self.engine = Engine(host, right)
        self.generation = ""

    def run(self) -> None:
        """Everything, in order."""
        self.load()
        with self.engine:
            self.engine.until_answered(0.0)
            for name, act in {
                "SIGKILL of the rank": self.kill,
                "systemctl restart": self.restart,
                "daemon-reexec, restart": self.reexec,
                "upgrade, restart": self.upgrade,
                "SIGKILL, once more": self.kill,
            }.items():
                self.during(name, act)
        self.alone()
        self.stop()

    def load(self) -> None:
        """Start everything, and wait until it serves."""
        report, machine = self.report, self.host.machine
        report.facts["systemd"] = machine.version
        done = machine.run("systemd-analyze", "security", self.unit, check=False)
        report.tell("".join(done.stdout.strip().splitlines()[-1:]))
        machine.systemctl("start", "--no-block", "preloadd.target")
        self._until(lambda: self.host.state(self.unit) in ("active", "failed"), LOAD_S)
        told = self.told()
        assert told.state == "serving", told
        self.generation = told.generation
        self.arena = told.arena_bytes
        report.facts["counters"] = dict(told.counters)
        nbytes = told.tensor_bytes
        report.holds("load", "the weights are of the size asked for", nbytes >= 1, f"{nbytes:,} B")
        report.figure("load", "from process start to ready", self.ready_s(), "s")
        report.figure("load", "arena / tensor bytes", told.arena_bytes / nbytes, "", at_most=1.01)
        health = self.host.ctl("status", "--json")
        report.holds("load", "preloadctl status is content", health.returncode == 0)

    def during(self, name: str, act: Callable[[], None]) -> None:
        """One event while the engine computes."""
        host, report = self.host, self.report
        old, since = host.pid(self.gpu), time.monotonic()
        act()
        host.until_back([self.gpu], [old])
        outage = time.monotonic() - since
        self.engine.until_answered(time.monotonic())
        told = self.told()
        answers = self.engine.answers(since)
        gap = max((b["at"] - a["at"] for a, b in pairwise(answers)), default=0.0)
        report.figure(name, "ready, from process start", self.ready_s(), "s", at_most=READY_S)
        report.figure(name, "until it serves again, all in all", outage, "s")
        self.adopted(name, told)
        report.holds(name, "the engine's lease goes on", told.lease_count == 1)
        right = all(answer["answer"] == self.engine.right for answer in answers)
        report.holds(name, "the engine's sums are right throughout", right, f"{len(answers)} sums")
        report.figure(name, "longest between two sums", gap, "s")

    def adopted(self, name: str, told: StatusTold) -> None:
        """Whether the weights are those of before, and nothing was read."""
        same = told.adopted and told.generation == self.generation
        self.report.holds(name, "the weights are adopted", same)
        read, loads = told.counters["bytes_read"], told.counters["loads"]
        self.report.figure(name, "bytes read", read + loads, "", at_most=0)

    def kill(self) -> None:
        """The rank alone is killed."""
        self.host.kill(self.gpu)

    def restart(self) -> None:
        """As an administrator does."""
        self.host.machine.systemctl("restart", self.unit)

    def reexec(self) -> None:
        """The manager is renewed, then the rank."""
        self.host.machine.systemctl("daemon-reexec")
        self.restart()

    def upgrade(self) -> None:
        """Another version of units and code is put in place, as packages do, and all restarted."""
        machine = self.host.machine
        text = machine.path(UNIT).read_text()
        machine.write(UNIT, text.replace("preloadd rank %i", "preloadd rank %i, next", 1))
        script = f"""
        cp -a {CODE} {CODE}.new
        sed -i 's/^__version__ = .*/__version__ = "9.9.9"/' {CODE}.new/__init__.py
        umount -l {CODE}
        rm -rf {CODE} && mv {CODE}.new {CODE}
        """
        machine.run("sh", "-euc", script)
        machine.systemctl("daemon-reload")
        machine.systemctl("restart", "preloadd.target")
        assert self.told().version == "9.9.9", self.told().version

    def alone(self) -> None:
        """What is left when no process of ours lives, and whether it is still right."""
        name, host = "nobody lives", self.host
        group = GROUP.format(model=MODEL, gpu=self.gpu, pause=4)
        host.machine.write("/etc/preloadd/groups.d/weights.toml", group)
        host.machine.systemctl("daemon-reload")
        host.machine.systemctl("stop", "preloadd-supervisor.service")
        self.report.holds(name, "no process has a context", not contexts())
        arena = round(self.arena / MIB)
        rank_alone = used_mib() - self.before
        self.report.figure(
            name,
            "rank alone: more or less than the arena",
            abs(rank_alone - arena),
            "MiB",
            at_most=0,
        )
        old = host.pid(self.gpu)
        self.kill()
        host.until(lambda: not host.pid(self.gpu), "end of the rank")
        time.sleep(0.3)
        left = processes(host)
        samples = [used_mib() - self.before for _ in range(3)]
        stored = host.stored(self.gpu)
        self.report.holds(name, "no process of ours", not left, ", ".join(left))
        self.report.holds(name, "nor any context", not contexts())
        same = samples == [rank_alone] * 3
        self.report.holds(name, "device memory is the arena's", same, f"{samples[0]:,} MiB")
        self.report.holds(name, "descriptors are stored", stored >= 2, f"{stored}")
        host.until_back([self.gpu], [old])
        self.report.figure(name, "ready, from process start", self.ready_s(), "s", at_most=READY_S)
        self.adopted(name, self.told())
        seen = len(self.engine.verified)
        with self.engine:
            host.until(lambda: len(self.engine.verified) > seen or not self.engine.pid, "look")
        looks = self.engine.verified
        wrong = [number for look in looks for number in look["wrong"]]
        told = f"{len(looks)} looks at {looks[-1]['verified']:,} bytes" if looks else "no look"
        self.report.holds("engine", "every byte is right", len(looks) >= 4 and not wrong, told)
        sums = self.engine.answers()
        right = all(answer["answer"] == self.engine.right for answer in sums)
        self.report.holds("engine", "every sum is right", right, f"{len(sums):,} sums")

    def stop(self) -> None:
        """A stop frees everything."""
        machine = self.host.machine
        machine.systemctl("stop", "preloadd.target", "preloadd@*.service")
        settled = device.settles(lambda: used_mib() == self.before)
        told = f"{used_mib() - self.before:+,} MiB"
        self.report.holds("systemctl stop", "device memory is back at the start", settled, told)
        self.report.figure("systemctl stop", "stored", self.host.stored(self.gpu), "", at_most=0)

    def told(self) -> StatusTold:
        """What the rank tells of itself."""
        try:
            return self.host.told_by(self.gpu)
        except PreloadError as error:
            raise AssertionError(f"{self.host.state(self.unit)}: {error}") from error

    def ready_s(self) -> float:
        """Seconds from the start of the rank's process until it was ready, as systemd saw it."""
        began = int(self.host.machine.show(self.unit, "ExecMainStartTimestampMonotonic"))
        return (
            int(self.host.machine.show(self.unit, "ActiveEnterTimestampMonotonic")) - began
        ) / 1e6

    def _until(self, seen: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < deadline, f"not in {seconds:g} s"
            time.sleep(0.05)


def processes(host: Host) -> list[str]:
    """All processes of the machine that run preloadd or an engine."""
    namespace = Path(f"/proc/{host.machine.pid}/ns/pid").readlink()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            is_ours = "preloadd" in command or "tests.gpu" in command
            if is_ours and (process / "ns/pid").readlink() == namespace:
                found.append(command)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
