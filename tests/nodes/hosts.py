"""Hosts for tests: namespaces with addresses of their own, plugged into one switch.

The switch is a bridge in a namespace of its own: nothing of this reaches the machine's network. A
host has its own processes, of which all end with the first, and its own folder; files are those of
this machine. It needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from preloadd.linux.owner import Owner

NETWORK = "192.0.2"
"""Set aside for examples, so that nobody's real host is meant (RFC 5737)."""

PATIENCE_S = 30.0
"""How long anything may take on a busy machine before it counts as never."""

_TOOLS = {
    "ip": "iproute2",
    **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux"),
}

# It has the kernel reap whoever is handed to it.
_WAIT = "import signal as s; s.signal(s.SIGCHLD, s.SIG_IGN); print(flush=True); s.pause()"
_FIRST = (sys.executable, "-ISc", _WAIT)
_LISTENING, _CONNECTED = "0A", "01"


class NoHosts(Exception):
    """Hosts cannot be made here; the text says what is missing."""


class Host(Owner):
    """One host. `folder` is where its commands may leave something; `address` is in `NETWORK`."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.address = f"{NETWORK}.{number + 1}"
        self.folder = folder
        for part in ("sockets", "tmp", "cache"):
            (folder / part).mkdir(mode=0o700, parents=True)
        self._first = _Held("--net", "--pid", "--mount", "--mount-proc")
        self._namespace = _namespace(self._first.pid)

    @property
    def sockets(self) -> Path:
        """The folder of its ranks' sockets."""
        return self.folder / "sockets"

    @property
    def first(self) -> int:
        """Its first process, as numbered here."""
        return self._first.pid

    @property
    def processes(self) -> dict[int, list[str]]:
        """The command line of every process but the first, by its number here."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                pid = int(path.name)
                if pid != self.first and _namespace(pid) == self._namespace:
                    found[pid] = (path / "cmdline").read_bytes().decode().split("\0")
        return found

    def running(self, module: str) -> list[int]:
        """The processes that run a module of Python, by their numbers here."""
        return [pid for pid, argv in self.processes.items() if module in argv]

    @property
    def listening(self) -> list[int]:
        """Ports that something listens at."""
        return self._ports(_LISTENING)

    @property
    def connected(self) -> list[int]:
        """Ports of its own that have a connection."""
        return self._ports(_CONNECTED)

    @property
    def left(self) -> str:
        """What its commands have left behind, for people; '' where nothing is, or no power.

        Memory is not looked for: without a process nobody has it.
        """
        if not self.powered:
            return ""
        files = [*self.sockets.rglob("*.sock"), *(self.folder / "tmp").iterdir()]
        processes = [f"{pid} {' '.join(argv)}" for pid, argv in self.processes.items()]
        ports = [f"port {port}" for port in self.listening]
        return "; ".join([*map(str, files), *processes, *ports])

    @property
    def powered(self) -> bool:
        """Whether it has not been switched off."""
        return not self._first.ended

    def start(
        self,
        argv: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """A command in it, which is reaped by whoever started it. What it says goes to `log`.

        Its status is that of the command. To end it, end what is in `processes`.
        """
        own = {"TMPDIR": str(self.folder / "tmp"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        with log.open("ab") as told:
            return subprocess.Popen(
                [*self._enter("--net", "--pid", "--mount"), *argv],
                env={**environ, **own},
                stdin=stdin,
                stdout=told,
                stderr=told,
            )

    def ip(self, commands: Iterable[str]) -> None:
        """Have `ip` do these in its network."""
        _ip(self.first, commands)

    def power_off(self) -> None:
        """End everything in it at once, without a word to anything."""
        self._first.close()

    def close(self) -> None:
        """The same."""
        self.power_off()

    def _ports(self, state: str) -> list[int]:
        tables = [Path(f"/proc/{self.first}/net/{kind}") for kind in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
        return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == state]

    def _enter(self, *namespaces: str) -> list[str]:
        return ["nsenter", f"--target={self.first}", *namespaces]


class Network(Owner):
    """Hosts that reach each other, until they are unplugged."""

    def __init__(self, count: int, folder: Path) -> None:
        _require()
        with ExitStack() as owned:
            self._switch = owned.enter_context(_Held("--net"))
            _ip(self._switch.pid, ("link add switch type bridge", "link set switch up"))
            self.hosts = [
                owned.enter_context(Host(number, folder / str(number))) for number in range(count)
            ]
            for host in self.hosts:
                self._join(host)
            self._owned = owned.pop_all()

    def unplug(self, host: Host) -> None:
        """Nothing gets to it or from it any more, and nobody is told."""
        _ip(self._switch.pid, [f"link set port{host.number} down"])

    def plug(self, host: Host) -> None:
        """The opposite."""
        _ip(self._switch.pid, [f"link set port{host.number} up"])

    def close(self) -> None:
        """End everything: namespaces, and what connects them, go with their last process."""
        self._owned.close()

    def _join(self, host: Host) -> None:
        port = f"port{host.number}"
        _ip(
            self._switch.pid,
            (
                f"link add {port} type veth peer name eth0 netns {host.first}",
                f"link set {port} master switch up",
            ),
        )
        host.ip(
            (
                "link set lo up",
                f"addr add {host.address}/24 dev eth0",
                "link set eth0 up",
            )
        )


class _Held(Owner):
    """A process for whose sake namespaces are there; `pid` is its number here."""

    def __init__(self, *namespaces: str) -> None:
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", *namespaces),
                *("--fork", "--kill-child", *_FIRST),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with self._process.stdout as told, self._process.stderr as complaints:
            if not told.readline():
                self._process.wait(PATIENCE_S)
                raise NoHosts(f"namespaces cannot be made: {complaints.read().strip()}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pid = int(children.read_text())

    @property
    def ended(self) -> bool:
        """Whether it is gone, with all that depended on it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End it."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._process.wait(PATIENCE_S)


def _require() -> None:
    if os.geteuid() != 0:
        raise NoHosts("only root can make hosts")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise NoHosts(f"{tool} is missing (Debian: apt install {package})")


def _ip(pid: int, commands: Iterable[str]) -> None:
    """Have `ip` do these in the network of a process; NoHosts if the kernel does not let it."""
    done = subprocess.run(
        ["nsenter", f"--target={pid}", "--net", "ip", "-batch", "-"],
        input="\n".join([*commands, ""]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode:
        raise NoHosts(f"ip failed: {done.stderr.strip()}")


def _namespace(pid: int) -> str:
    """Which processes this one sees, and is seen by."""
    return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - it is no path
