"""A machine for tests: a real systemd as process 1 of namespaces, over a throw-away view of `/`.

It needs root, overlayfs and a writable cgroup2 mount, but no package beyond systemd and util-linux.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOT = Path(__file__).with_name("boot.sh")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = ("--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup")
PATIENCE_S = 30.0
"""How long anything may take on a busy machine before it counts as never."""

MASKED = (
    # They would reach through to the kernel.
    *("systemd-modules-load.service", "modprobe@.service", "systemd-sysctl.service"),
    *("sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-kernel-config.mount"),
    *("sys-fs-fuse-connections.mount", "dev-hugepages.mount", "systemd-remount-fs.service"),
    *("proc-sys-fs-binfmt_misc.automount", "systemd-binfmt.service", "systemd-pstore.service"),
    *("systemd-random-seed.service", "systemd-timesyncd.service"),
    # They would only take time.
    *("systemd-firstboot.service", "systemd-hostnamed.socket", "systemd-tmpfiles-clean.timer"),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "man-db.timer"),
    *("e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer"),
)


class NoMachine(Exception):
    """Machines cannot be made here; the text says what is missing."""


class Failed(AssertionError):
    """A command inside a machine failed; the text is what it printed."""


@dataclass(frozen=True)
class Plan:
    """What to boot. `layers` are folders laid over `root`, in their order.

    `root` is that of this machine, or that of another system, which is not written to. `binds` are
    pairs of a folder here and where it is seen, read-only. `prepare` is a shell command that runs
    inside before systemd does; `unit` is what systemd starts.
    """

    root: Path = Path("/")
    layers: Sequence[Path] = ()
    binds: Sequence[tuple[Path, str]] = ()
    prepare: str = ":"
    unit: str = "basic.target"


class Machine:
    """A booted machine. Commands run inside, as root, in all its namespaces."""

    def __init__(self, pid: int) -> None:
        """`pid` is its systemd, as seen from here."""
        self.pid = pid
        self.root = Path(f"/proc/{pid}/root")
        """Its file system, as seen from here."""

    def run(
        self, *argv: str, check: bool = True, environ: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        """What came of a command; Failed if that is a failure and `check` is set."""
        done = subprocess.run(
            self._enter(argv),
            env=self._environ(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        if check and done.returncode:
            raise Failed(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    @contextmanager
    def running(self, *argv: str) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on while the test does something else; killed at the end."""
        command = self._enter(argv)
        with subprocess.Popen(
            command,
            env=self._environ({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def systemctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Ask the machine's systemd for something."""
        return self.run("systemctl", "--no-pager", *arguments, check=check)

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", "--value", f"--property={name}", unit).stdout.strip()

    @property
    def version(self) -> int:
        """The machine's systemd."""
        return int(self.systemctl("--version").stdout.split()[1])

    def path(self, inside: str) -> Path:
        """A file of the machine, as seen from here."""
        return self.root / inside.lstrip("/")

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Write a file, and the folders it lies in."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def journal(self, *arguments: str) -> list[dict[str, Any]]:
        """Entries of the journal, selected by options of journalctl."""
        self.run("journalctl", "--sync")
        shown = self.run("journalctl", "--quiet", "--all", "--output=json", *arguments)
        return [json.loads(line) for line in shown.stdout.splitlines()]

    def messages(self, unit: str) -> list[str]:
        """What a unit, and systemd about it, wrote to the journal."""
        return [str(entry["MESSAGE"]) for entry in self.journal(f"--unit={unit}")]

    def _enter(self, argv: Sequence[str]) -> list[str]:
        # Also its root folder and working folder, which are not those of the namespace.
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, "--root", "--wd", *argv]

    def _environ(self, more: Mapping[str, str]) -> dict[str, str]:
        fixed = {"PATH": PATH, "LANG": "C.UTF-8", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"}
        return {**fixed, **more}


@contextmanager
def booted(plan: Plan) -> Iterator[Machine]:
    """A machine in which all that `plan` starts has been started; gone without a trace afterwards.

    NoMachine if this one does not allow it. It ends with this process, however that ends.
    """
    if os.geteuid() != 0:
        raise NoMachine("only root can make machines")
    with ExitStack() as undo:
        scratch = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="machine-")))
        group = cgroup2() / scratch.name
        group.mkdir()
        undo.callback(_remove, group)
        output = undo.enter_context(tempfile.TemporaryFile("w+"))
        process = undo.enter_context(_namespaces(plan, scratch, group, output.fileno()))
        undo.callback(process.kill)
        try:
            machine = _up(process)
            undo.callback(_shut_down, machine, process)
            machine.systemctl("is-system-running", "--wait", check=False)
        except (Failed, TimeoutError) as error:
            output.seek(0)
            raise Failed(f"the machine did not boot: {error}\n{output.read()}") from error
        yield machine


def cgroup2() -> Path:
    """Where control groups can be made, with controllers or without; NoMachine."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup2" and "rw" in options.split(",") and os.access(where, os.W_OK):
            return Path(where)
    raise NoMachine("no cgroup2 file system is mounted that could be written")


def _namespaces(plan: Plan, scratch: Path, group: Path, output: int) -> subprocess.Popen[bytes]:
    """`unshare`, whose child becomes systemd; each is killed when its parent ends."""
    # Its control group is entered before the namespace is made, and so becomes the top one inside.
    enter = 'echo $$ >"$0/cgroup.procs"; exec setpriv --pdeathsig KILL unshare "$@"'
    unshare = [*NAMESPACES, "--fork", "--kill-child", "--propagation=private", "sh", str(BOOT)]
    binds = [str(part) for pair in plan.binds for part in pair]
    return subprocess.Popen(
        ["sh", "-c", enter, str(group), *unshare, str(scratch), plan.unit, *binds],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd="/",
        start_new_session=True,
        env={
            "PATH": PATH,
            "ROOT": str(plan.root),
            "LAYERS": " ".join(map(str, plan.layers)),
            "MASK": " ".join(MASKED),
            "PREPARE": plan.prepare,
        },
    )


def _up(process: subprocess.Popen[bytes]) -> Machine:
    """Wait until systemd can be talked to."""
    deadline = time.monotonic() + PATIENCE_S
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        with suppress(OSError, ValueError):
            machine = Machine(int(children.read_text()))
            is_systemd = Path(f"/proc/{machine.pid}/comm").read_text() == "systemd\n"
            if is_systemd and machine.path("/run/systemd/private").exists():
                return machine
        if time.monotonic() > deadline:
            raise TimeoutError("systemd is not there yet")
        time.sleep(0.01)
    raise Failed(f"exit {process.returncode}")


def _shut_down(machine: Machine, process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.kill(machine.pid, signal.SIGRTMIN + 3)
        process.wait(PATIENCE_S)


def _remove(group: Path) -> None:
    """Remove a control group with those below it, which empty a little after their processes."""
    deadline = time.monotonic() + PATIENCE_S
    while group.exists() and time.monotonic() < deadline:
        try:
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
        except OSError:
            time.sleep(0.02)
