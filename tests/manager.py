"""A service manager of a real rank daemon: what stands in for systemd, with a store of its own."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from preloadd.domain.ids import device_id
from preloadd.domain.leases import Mode
from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.engine.client import Attachment, attach
from preloadd.engine.native import NativeCheckpoint
from preloadd.engine.options import Options
from preloadd.linux.fds import OwnedFd
from preloadd.linux.fdstore import FdStore
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.notify import PROGRESS, NotifySocket
from preloadd.linux.process import Child, spawn
from preloadd.memory.host import HostMapper
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Client, connect
from preloadd.transport.status import ask_status
from tests import waiting
from tests.checkout import ROOT
from tests.leases import let_go
from tests.waiting import eventually


class Manager:
    """A service manager of one rank: starts it, follows what it says, keeps what it parks.

    It works in a thread of its own. `told` is what this life of the rank said, message by message;
    `removed` the names it had dropped since the test began.
    """

    def __init__(self, folder: Path, settings: RankSettings) -> None:
        self.folder = folder
        self.settings = settings
        self.told: list[dict[str, str]] = []
        self.removed: list[str] = []
        self.prelude = ""
        """Shell commands to run in the rank's process before it is the rank."""
        self.interpreter = [sys.executable]
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "NOTIFY_SOCKET": str(folder / "notify"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        self._log = folder / "log"
        self._log_start = 0
        self._child: Child | None = None
        self._changed = threading.Condition()
        self._hangs = self._closing = False
        self._drained = 0
        self._at_rest = 0
        with ExitStack() as owned:
            self._store = owned.enter_context(FdStore(1024))
            self._notify = owned.enter_context(NotifySocket(folder / "notify"))
            self._wake = os.eventfd(0)
            owned.callback(os.close, self._wake)
            self._thread = threading.Thread(target=self._work, name="manager")
            self._thread.start()
            owned.callback(self._stop_working)
            owned.callback(self._forget)
            self._owned = owned.pop_all()

    # -- the rank's life --

    def start(self) -> None:
        """Begin a life, with all that earlier ones parked."""
        self._forget()
        encoded = msgspec.json.encode(self.settings)
        with self._changed, sealed_bytes("settings", encoded) as settings:
            self.told = []
            self._log_start = self._log.stat().st_size if self._log.exists() else 0
            self._child = spawn(
                [
                    *("/bin/sh", "-c", f'{self.prelude} exec "$@" 2>>"$0"', str(self._log)),
                    *(*self.interpreter, "-m", "preloadd.rank", self.settings.instance),
                ],
                environ=self.environ,
                fds=[("settings", settings.fileno()), *self._store.items()],
                parent_death_signal=signal.SIGKILL,
            )

    def ready(self) -> None:
        """Wait until this life serves."""
        self.until(lambda: any("READY" in fields for fields in self.told), "READY=1")
        self._at_rest = self.descriptors

    def kill(self) -> None:
        """End the rank without a word to it."""
        self.signal(signal.SIGKILL)
        assert self.ended() == 128 + signal.SIGKILL, self.account()

    def restart(self) -> None:
        """Kill the rank, and have it serve again with what it parked."""
        self.kill()
        self.start()
        self.ready()

    def signal(self, number: int) -> None:
        """Send a signal to the rank."""
        self.child.signal(number)

    def ended(self, timeout: float | None = None) -> int:
        """Wait for the end of this life; its exit status. All it said has been followed then."""
        try:
            status = self.child.wait(timeout or waiting.PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"the rank still runs: {self.account()}") from None
        self._drain()
        return status

    @property
    def child(self) -> Child:
        """The process of this life."""
        assert self._child is not None
        return self._child

    @property
    def pid(self) -> int:
        """The rank's number."""
        return self.child.pid

    # -- what is known of it --

    @property
    def log(self) -> str:
        """What this life wrote to standard error."""
        if not self._log.exists():
            return ""
        with self._log.open() as file:
            file.seek(self._log_start)
            return file.read()

    @property
    def phases(self) -> list[str]:
        """What the rank reported to be doing, without repetitions."""
        told = [f[PROGRESS].partition(";")[0] for f in self.told if PROGRESS in f]
        return list(dict.fromkeys(told))

    @property
    def parked(self) -> dict[str, int]:
        """Every name in the store and how many descriptors it has."""
        with self._changed:
            names = [name for name, _ in self._store.items()]
        return {name: names.count(name) for name in names}

    @property
    def leases(self) -> list[str]:
        """Names in the store that are leases."""
        return [name for name in self.parked if name.startswith("lease.")]

    @property
    def generation(self) -> str:
        """The id of the one generation in the store."""
        (name,) = [name for name in self.parked if name.startswith("manifest.")]
        return name.partition(".")[2]

    @property
    def arena(self) -> set[str]:
        """Names in the store that are manifest or chunk."""
        return {name for name in self.parked if name.startswith(("manifest.", "chunk."))}

    @property
    def descriptors(self) -> int:
        """How many descriptors the rank has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def rests(self) -> None:
        """Wait until the rank has no more and no fewer descriptors than when it became ready."""
        eventually(
            lambda: self.descriptors == self._at_rest,
            lambda: f"{self._at_rest} descriptors, now {self.descriptors}",
        )

    def loaders(self) -> list[int]:
        """Processes that load for a rank of this manager, whoever their parent is by now."""
        mark = f"XDG_CACHE_HOME={self.environ['XDG_CACHE_HOME']}".encode()
        return [pid for pid in _processes("preloadd.loader") if mark in _environ(pid)]

    @contextmanager
    def stuck_loads(self) -> Iterator[None]:
        """In this block no load gets past identifying the content, if that is read in full.

        Loaders wait for the lock of the digests' cache, so this one takes it.
        """
        folder = Path(self.environ["XDG_CACHE_HOME"], "preloadd", "digests")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def account(self) -> str:
        """All that is known of this life, for the text of a failure."""
        return f"status {self.child.poll()}, told {self.told}, log:\n{self.log}"

    def until(self, seen: Callable[[], object], what: str) -> None:
        """Wait until `seen` holds, which is asked after every message; fails when it cannot."""
        deadline = time.monotonic() + waiting.PATIENCE_S
        while True:
            ended = self.child.poll() is not None
            if ended:
                self._drain()
            with self._changed:
                if seen() or self._changed.wait_for(seen, timeout=0.05):
                    return
            assert not ended, f"the rank ended before {what}: {self.account()}"
            assert time.monotonic() < deadline, f"no {what}: {self.account()}"

    def until_phase(self, phase: str) -> None:
        """Wait until the rank reports to be in `phase` of a load."""
        self.until(lambda: phase in self.phases, f"phase {phase}")

    # -- the store --

    def park(self, name: str, fd: OwnedFd) -> None:
        """Put something into the store. Takes `fd`."""
        with self._changed:
            self._store.add(name, [fd], poll=False)

    def copies(self, name: str) -> list[OwnedFd]:
        """Copies of what is stored as `name`; the caller's to close."""
        with self._changed:
            return [OwnedFd.copy_of(fd) for found, fd in self._store.items() if found == name]

    def unpark(self, name: str) -> None:
        """Lose what is stored as `name`."""
        with self._changed:
            self._store.remove(name)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """In this block the manager reads nothing."""
        self._set_hanging(hangs=True)
        try:
            yield
        finally:
            self._set_hanging(hangs=False)

    def close(self) -> None:
        """Kill the rank, and let go of everything."""
        self._owned.close()

    # -- clients --

    @property
    def socket(self) -> Path:
        """Where the rank listens."""
        instance = self.settings.parsed_instance
        return Path(self.settings.socket_dir, str(instance), instance.socket_name)

    def status(self) -> m.StatusTold:
        """What the rank tells of itself."""
        return ask_status(self.socket, timeout=waiting.PATIENCE_S)

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """How `preloadctl` ended, which looks at this rank alone."""
        command = [sys.executable, "-m", "preloadd.cli", *arguments]
        environ = {**self.environ, "PRELOADD_SOCKET_DIR": self.settings.socket_dir}
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    def client(self) -> Client:
        """A connection to the rank; the caller's to close."""
        return connect(self.socket, timeout=waiting.PATIENCE_S)

    def ask(self, request: m.Request) -> m.Reply:
        """The answer to one request on a connection of its own."""
        with self.client() as client:
            return client.call(request, timeout=waiting.PATIENCE_S).reply

    def attach(
        self, model: Path | None = None, *, mode: Mode = Mode.ZERO_COPY, parked: bool = True
    ) -> Attachment:
        """Attach as an engine that has the checkpoint in `model`; with `parked`, wait for that.

        The lease is closed at the latest with this manager.
        """
        options = Options(socket_path=self.socket, mode=mode, connect_timeout_s=waiting.PATIENCE_S)
        lease = attach(self.wanted(model), options, HostMapper(), environ={}, uid=os.geteuid())
        self._owned.callback(let_go, lease)
        if parked:
            held = self.status().lease_count
            self.until(lambda: len(self.leases) >= held, "parked lease")
        return lease

    def wanted(self, model: Path | None = None):
        """What such an engine asks for."""
        checkpoint = NativeCheckpoint(model or Path(self.settings.model.path))
        instance = self.settings.parsed_instance
        return checkpoint.wanted(
            device_id(instance.device),
            client="test",
            role=instance.role,
            placement=self.settings.model.placement,
        )

    # -- the thread --

    def _work(self) -> None:
        while not self._closing:
            sources = [self._wake] if self._hangs else [self._wake, self._notify, self._store]
            readable, _, _ = select.select(sources, [], [])
            with self._changed:
                if self._wake in readable:
                    os.eventfd_read(self._wake)
                if self._store in readable:
                    self._store.expire()
                if self._notify in readable and not self._hangs:
                    self._follow()
                self._changed.notify_all()

    def _follow(self) -> None:
        message = self._notify.receive()
        if message is None:
            return
        fields = message.fields
        if "FDSTORE" in fields:
            self._store.add(message.name, message.fds, poll=fields.get("FDPOLL") != "0")
        else:
            message.close()
        if "FDSTOREREMOVE" in fields:
            self._store.remove(message.name)
            self.removed.append(message.name)
        if "DRAINED" in fields:
            self._drained += 1
        elif self._child is not None and message.pid == self._child.pid:
            self.told.append(fields)

    def _drain(self) -> None:
        """Return when all that was sent until now has been followed."""
        with self._changed:
            due = self._drained + 1
        # Not under the lock: it waits while the queue is full, which the thread empties under it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"DRAINED=1", os.fspath(self._notify.path))
        with self._changed:
            assert self._changed.wait_for(lambda: self._drained >= due, waiting.PATIENCE_S)

    def _set_hanging(self, *, hangs: bool) -> None:
        with self._changed:
            self._hangs = hangs
        os.eventfd_write(self._wake, 1)

    def _forget(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _stop_working(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()


Manage = Callable[..., Manager]


@contextmanager
def managing() -> Iterator[Manage]:
    """A maker of managers that closes them all at the end.

    Takes the model's folder, settings of the model as keywords, and those of the rank in `rank`.
    """
    with ExitStack() as owned:

        def manage(model: Path, *, rank: dict[str, Any] | None = None, **more: Any) -> Manager:
            folder = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp"))
            owned.callback(shutil.rmtree, folder)
            (folder / "s").mkdir(mode=0o700)
            settings = RankSettings(
                group="tests",
                instance="CPU-0",
                socket_dir=str(folder / "s"),
                derived=False,
                model=ModelSettings(path=str(model), name=model.name, **more),
            )
            manager = Manager(folder, dataclasses.replace(settings, **(rank or {})))
            owned.callback(manager.close)
            return manager

        yield manage


def _processes(module: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if module.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                yield int(folder.name)


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
