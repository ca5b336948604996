"""Talking to a service manager: state, time, and descriptors it keeps for the next start.

`Notifier` is the service's side, `inherited` what a restarted service gets back. `NotifySocket` is
the manager's side, for the foreground launcher. Both speak sd_notify(3), so that a rank cannot tell
systemd from the launcher.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from preloadd.errors import ConfigError, ProtocolViolation
from preloadd.linux import ancillary
from preloadd.linux.fds import MAX_FDS, OwnedFd
from preloadd.linux.owner import Owner
from preloadd.linux.paths import unusable
from preloadd.linux.seqpacket import Pressure, check_length, pressure, set_send_timeout

log = logging.getLogger(__name__)

MAX_DATAGRAM = 4096
"""Bytes. systemd drops longer messages."""
MAX_NAME = 255
PROGRESS = "X_PRELOADD_PROGRESS"
"""Field with phase, bytes done and bytes in total, separated by ';'. systemd ignores X_ fields."""

FAILED = "failed: "
"""How a status begins that says why the service ends."""

BUNDLED = Path(__file__).parents[2] / "bundled"
"""Where packages of a whole system carry what the environments of engines lack: sdnotify."""

SEND_S = 5.0
"""Seconds that a message which must arrive may wait for a manager that does not read."""

_PAUSE_S = 0.01
# Characters; each takes at most four bytes of MAX_DATAGRAM.
_MAX_STATUS = 900


def valid_name(name: str) -> bool:
    """Whether descriptors can be stored as `name`: printable ASCII, no ':'."""
    return 0 < len(name) <= MAX_NAME and name.isascii() and name.isprintable() and ":" not in name


class Notifier:
    """A service's line to its manager. Without one ($NOTIFY_SOCKET unset) every call does nothing.

    A message that only informs is worth no outage and no waiting: if it cannot be sent at once,
    that is logged once, or for debugging only if the manager is just busy. The others wait for room
    and raise OSError, since the manager would otherwise kill the service or lose its memory.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Connect; ConfigError if the manager's socket is named but not there."""
        self._socket = _connect(environ.get("NOTIFY_SOCKET", ""))
        self._complained = False

    @property
    def listening(self) -> bool:
        """Whether there is a manager."""
        return self._socket is not None

    def ready(self) -> None:
        """The service serves from now on."""
        self._send({"READY": "1"})

    def status(self, text: str) -> None:
        """One line for people, cut to a reasonable length."""
        self._inform({"STATUS": _line(text)})

    def failed(self, reason: object) -> bool:
        """The last status of a service that ends: waits for room, but fails without a word.

        Whether there is a manager, and has all of it.
        """
        told = _line(f"{FAILED}{reason}")
        with suppress(OSError):
            self._send({"STATUS": told})
            return self.listening and len(told) < _MAX_STATUS
        return False

    def progress(self, text: str, phase: str, done: int, total: int) -> None:
        """A status with the same facts for machines; `done` and `total` are bytes."""
        self._inform({"STATUS": _line(text), PROGRESS: f"{phase};{done};{total}"})

    def extend_timeout(self, seconds: float) -> None:
        """Ask for this much more time, from now, for the start or stop in progress."""
        self._inform({"EXTEND_TIMEOUT_USEC": str(int(seconds * 1_000_000))})

    def watchdog(self) -> None:
        """A sign of life."""
        self._inform({"WATCHDOG": "1"})

    def stopping(self) -> None:
        """The service begins to end."""
        self._inform({"STOPPING": "1"})

    def store(self, name: str, fds: Sequence[int], *, poll: bool) -> None:
        """Have copies of borrowed `fds` kept as `name` for the next start.

        With `poll` the manager drops one by itself when its peer hangs up. It drops silently what
        exceeds its maximum: count afterwards, behind a `barrier`.
        """
        fields = {"FDSTORE": "1", "FDNAME": _checked(name)} | ({} if poll else {"FDPOLL": "0"})
        for start in range(0, len(fds), MAX_FDS):
            self._send(fields, fds[start : start + MAX_FDS])

    def remove(self, name: str) -> None:
        """Have all descriptors kept as `name` closed."""
        self._send({"FDSTOREREMOVE": "1", "FDNAME": _checked(name)})

    def barrier(self, timeout: float) -> None:
        """Return when the manager has handled all that was sent before; TimeoutError."""
        if self._socket is None:
            return
        ours, theirs = map(OwnedFd, os.pipe2(os.O_CLOEXEC))
        with ours:
            with theirs:
                self._send({"BARRIER": "1"}, [theirs.fileno()])
            hangup = select.poll()
            hangup.register(ours.fileno(), 0)
            if not hangup.poll(timeout * 1000):
                raise TimeoutError(f"the service manager did not answer in {timeout} s")

    def close(self) -> None:
        """Hang up. Later calls do nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _inform(self, fields: Mapping[str, str]) -> None:
        try:
            if self._socket is not None:
                self._socket.send(_encode(fields), socket.MSG_DONTWAIT)
        except OSError as error:
            busy = pressure(error) is not None
            level = logging.DEBUG if busy or self._complained else logging.WARNING
            log.log(level, "the service manager cannot be told %s: %s", [*fields], error)
            self._complained |= not busy

    def _send(self, fields: Mapping[str, str], fds: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        until = time.monotonic() + SEND_S
        while True:
            try:
                ancillary.send(self._socket, _encode(fields), fds)
            except OSError as error:
                waits = pressure(error)
                if waits is Pressure.WRITABLE:
                    raise TimeoutError(
                        f"the service manager read nothing for {SEND_S:g} s"
                    ) from error
                if waits is None or time.monotonic() >= until:
                    raise
            else:
                return
            time.sleep(_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Notification:
    """One message of a service, unknown fields included. Whoever holds it owns `fds`.

    `pid` is the sending process as the kernel knows it. A message with BARRIER is answered by
    closing it.
    """

    fields: dict[str, str]
    fds: tuple[OwnedFd, ...]
    pid: int

    @property
    def name(self) -> str:
        """The name its descriptors are to be stored or removed under."""
        return self.fields.get("FDNAME", "stored")

    def close(self) -> None:
        """Close the descriptors nobody took."""
        for fd in self.fds:
            fd.close()


class NotifySocket(Owner):
    """The manager's end, at `path` in a private folder. Removed on close."""

    def __init__(self, path: Path) -> None:
        check_length(path)
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            path.unlink(missing_ok=True)
            self._socket.bind(os.fspath(path))
            self._bound = path.lstat()
        except OSError as error:
            self._socket.close()
            raise unusable(path, error) from error

    @property
    def reachable(self) -> bool:
        """Whether it is this socket that is found at the path."""
        try:
            return os.path.samestat(self.path.lstat(), self._bound)
        except OSError:
            return False

    def fileno(self) -> int:
        """Readable when there is a message."""
        return self._socket.fileno()

    def receive(self) -> Notification | None:
        """The next message, or None if there is none now; the caller owns its descriptors.

        ProtocolViolation for a message that is too long, no text or names its descriptors badly,
        OutOfDescriptors if they do not fit: it is gone then, and its descriptors are closed.
        """
        try:
            received = ancillary.receive(self._socket, MAX_DATAGRAM)
        except BlockingIOError:
            return None
        try:
            return Notification(_decode(received.data), received.fds, received.pid)
        except ProtocolViolation:
            for fd in received.fds:
                fd.close()
            raise

    def close(self) -> None:
        """Remove the path and close the socket."""
        if self.reachable:
            with suppress(OSError):
                self.path.unlink()
        self._socket.close()


def watchdog_interval(environ: Mapping[str, str]) -> float | None:
    """Seconds between two signs of life: half of what the manager waits; None if it does not."""
    usec = environ.get("WATCHDOG_USEC", "")
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not usec.isdigit():
        return None
    return int(usec) / 2_000_000


_MANAGERS = frozenset(
    {
        *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),
        *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
    }
)


def without_manager(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child: what a manager told this process concerns no other."""
    return {name: value for name, value in environ.items() if name not in _MANAGERS}


def _connect(address: str) -> socket.socket | None:
    if not address:
        return None
    if str(BUNDLED) not in sys.path:
        # Searched last: what an engine brings itself goes first.
        sys.path.append(str(BUNDLED))
    from sdnotify import SystemdNotifier  # which may be there only now

    try:
        # Without `debug` it would swallow every error. Its `notify` is not used: that encodes
        # latin-1 and passes no descriptors.
        connected: socket.socket = SystemdNotifier(debug=True).socket
    except OSError as error:
        raise ConfigError(
            f"the service manager's socket {address} ($NOTIFY_SOCKET) cannot be reached: {error}: "
            "unset NOTIFY_SOCKET to run without a manager"
        ) from error
    set_send_timeout(connected, SEND_S)
    return connected


def _line(text: str) -> str:
    """`text` as a status: a line break would begin another field."""
    return " ".join(text.splitlines())[:_MAX_STATUS]


def _encode(fields: Mapping[str, str]) -> bytes:
    return "\n".join(f"{key}={value}" for key, value in fields.items()).encode(errors="replace")


def _decode(data: bytes) -> dict[str, str]:
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise ProtocolViolation("a notification that is no text") from error
    fields: dict[str, str] = {}
    for key, equals, value in (line.partition("=") for line in lines):
        if equals:
            fields.setdefault(key, value)
    if not valid_name(fields.get("FDNAME", "stored")):
        raise ProtocolViolation(f"descriptors under the name {fields['FDNAME']!r}")
    return fields


def _checked(name: str) -> str:
    if not valid_name(name):
        raise ValueError(f"{name!r} is no name for descriptors: printable ASCII without ':'")
    return name
