"""One rank over all its lives: its process, its notify socket and what it parked.

Nothing here waits: `group` does, and calls in when a descriptor is readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from preloadd.domain.settings import RankSettings
from preloadd.errors import OutOfDescriptors, PreloadError, ProtocolViolation
from preloadd.launcher.checks import is_of_engines, require_spare
from preloadd.launcher.private import private_folder
from preloadd.launcher.processes import Process, child_environ
from preloadd.launcher.progress import Report, parse_report
from preloadd.linux import seqpacket
from preloadd.linux.fdstore import FdStore
from preloadd.linux.lending import LENT, take_back
from preloadd.linux.locks import Lock
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.notify import PROGRESS, Notification, NotifySocket
from preloadd.linux.owner import Owner
from preloadd.protocol.messages import SETTINGS, TOKENS
from preloadd.transport.accepting import Episode

MAX_PARKED = 1024
"""Descriptors of one rank: 128 chunks, a manifest, the listener, a lease for each engine."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank serves from now on."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A message of the rank could not be followed; the text says why."""

    text: str


News = Ready | Report | Trouble


class Rank(Owner):
    """Owns everything of one rank that must not outlive the launcher; `close` ends it all.

    `ready` says whether this life serves, `served` whether any ever did; `status` is what this
    life last told people.
    """

    def __init__(
        self,
        settings: RankSettings,
        command: Sequence[str],
        environ: Mapping[str, str],
        notify_path: Path,
        tokens: Sequence[str] = (),
    ) -> None:
        self.name = settings.instance
        self.ready = False
        self.served = False
        self.status = ""
        self._settings = settings
        self._started = False
        self._refused = Episode()
        self._environ = child_environ(environ)
        with ExitStack() as owned:
            self._listen(notify_path, owned)
            self.parked = owned.enter_context(FdStore(MAX_PARKED))
            told = {SETTINGS: msgspec.json.encode(settings)}
            if tokens and settings.seeding is not None:
                # Apart from the settings, which are written to logs and files.
                told[TOKENS] = "\n".join(tokens).encode()
            self._told = [
                (name, owned.enter_context(sealed_bytes(name, content)))
                for name, content in told.items()
            ]
            owned.callback(self._tidy)
            self.process = owned.enter_context(Process(command, self._environ))
            self._owned = owned.pop_all()

    @property
    def folder(self) -> Path:
        """Where the rank keeps its socket and its lock."""
        return Path(self._settings.socket_dir, self.name)

    @property
    def socket(self) -> Path:
        """Where engines find the rank."""
        return self.folder / self._settings.parsed_instance.socket_name

    def start(self) -> None:
        """Begin a life, with all that earlier ones parked: see `Process.start`.

        `notify` is another one from then on if it could not be found: who cleans temporary folders
        may not ask what is in use. PreloadError if there can be none.
        """
        if not self.notify.reachable:
            self.notify.close()
            self._listen(self._owned.enter_context(private_folder()) / "notify", self._owned)
        told = [(name, memory.fileno()) for name, memory in self._told]
        self.process.start([*told, *self.parked.items()])
        self._started, self.status = True, ""

    def news(self) -> Iterator[News]:
        """Follow every message that waits; yields what concerns others."""
        while True:
            try:
                message = self.notify.receive()
            except (ProtocolViolation, OutOfDescriptors) as error:
                yield Trouble(str(error))
                continue
            if message is None:
                return
            if message.pid == self.process.pid:
                yield from self._follow(message)
            else:
                message.close()

    def end(self) -> int:
        """Reap the process of this life, which has ended; its exit status."""
        self.ready = False
        return self.process.end()

    def close(self) -> None:
        """Kill the rank if it still lives, remove what it left, and let go of what it parked."""
        self._owned.close()

    def _listen(self, path: Path, owned: ExitStack) -> None:
        """Be told by lives to come at `path`."""
        self.notify = owned.enter_context(NotifySocket(path))
        self._environ["NOTIFY_SOCKET"] = str(path)

    def _follow(self, message: Notification) -> Iterator[News]:
        """Do what the rank asks. Descriptors are stored or closed, which answers a barrier."""
        fields = message.fields
        self.status = fields.get("STATUS", self.status)
        if fields.get("FDSTOREREMOVE") == "1":
            self.parked.remove(message.name)
        if fields.get("FDSTORE") == "1":
            yield from self._park(message)
        else:
            message.close()
        if (report := parse_report(fields.get(PROGRESS, ""))) is not None:
            yield report
        if fields.get("READY") == "1":
            self.ready = self.served = True
            yield Ready()

    def _park(self, message: Notification) -> Iterator[Trouble]:
        try:
            require_spare(message.name, message.fds)
            self.parked.add(message.name, message.fds, poll=message.fields.get("FDPOLL") != "0")
        except OutOfDescriptors as error:
            message.close()
            # An engine that connects again and again would fill the terminal.
            if not is_of_engines(message.name) or self._refused.begins():
                yield Trouble(str(error))

    def _tidy(self) -> None:
        """Remove what the rank left, unless another daemon has come to serve the device."""
        if self._started:
            with suppress(OSError, PreloadError), Lock.take(self.folder, self.name):
                seqpacket.remove(self.socket)
                take_back(self.folder / LENT)
