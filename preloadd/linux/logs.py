"""Where the log of a process goes: to the journal with fields, else to standard error for people.

The journal is spoken to in its own protocol, one datagram an entry; see systemd's page "Native
Journal Protocol". Only `main` configures.
"""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import select
import socket
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO

from preloadd.errors import PreloadError
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.outlet import outlet

log = logging.getLogger(__name__)

JOURNAL = Path("/run/systemd/journal/socket")

FLUSH_TIMEOUT = 1.0
"""Seconds that the journal may take for the last entries of a process that ends."""

_POLL_S = 0.001

_PRIORITIES = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)
_DEBUG = 7
_TOO_LONG = {errno.EMSGSIZE, errno.ENOBUFS}


def configure(
    level: str | int,
    environ: Mapping[str, str],
    *,
    identifier: str = "preloadd",
    fields: Mapping[str, str] | None = None,
    journal: Path = JOURNAL,
    waits: bool = True,
) -> None:
    """Send the log of this process from `level` up to where its standard error goes.

    `identifier` is the program's name, and `fields` hold for every line: in the journal they are
    PRELOADD_GROUP, PRELOADD_INSTANCE and so on; people are told the `instance`. A record may add
    `extra={"phase": …}`, and gets its PRELOADD_ERROR_CODE from the error that it tells of. With
    `waits` unset, people who do not read hold up nobody: see `outlet`. It takes a thread, which
    children that are forked have not. An error that nothing catches is logged then as well: to
    print it, as Python does, would wait.
    """
    known = fields or {}
    handler: logging.Handler
    if is_journal(environ, 2):
        handler = JournalHandler(journal, identifier, known)
    else:
        handler = logging.StreamHandler(sys.stderr) if waits else OutletHandler(outlet(sys.stderr))
        who = known.get("instance", "").replace("%", "%%")
        handler.setFormatter(
            logging.Formatter(
                f"%(asctime)s %(levelname)s {f'{who} ' if who else ''}%(name)s: %(message)s"
            )
        )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    if not waits:
        sys.excepthook = _uncaught
        threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("an error that nothing catches", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def is_journal(environ: Mapping[str, str], fd: int) -> bool:
    """Whether `fd` leads to the journal: the manager left its identity in $JOURNAL_STREAM."""
    found = os.fstat(fd)
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class OutletHandler(logging.StreamHandler[TextIO]):
    """Writes to an `outlet`, which it owns. What comes once that is closed is dropped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        if not self.stream.closed:
            super().emit(record)

    def close(self) -> None:
        """Close the outlet; `logging` calls this at exit."""
        self.stream.close()
        super().close()


class JournalHandler(logging.Handler):
    """Sends records as entries, and waits for nobody: event loops log as well. Owns a socket.

    While the journal's socket cannot be reached, lines with priorities go to standard error, which
    leads to the journal as well. What a journal that hangs takes in neither way is lost; how much
    that was comes before the next entry that it takes.
    """

    def __init__(self, path: Path, identifier: str, fields: Mapping[str, str]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._path = os.fspath(path)
        self._common = {"SYSLOG_IDENTIFIER": identifier} | {
            f"PRELOADD_{name.upper()}": value for name, value in fields.items() if value
        }
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(0)
        self._lost = 0
        self._fallback = logging.StreamHandler(sys.stderr)
        self._fallback.setFormatter(PriorityFormatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; a record that cannot be formatted is reported as `logging` does it."""
        try:
            entry = encode({**self._common, **dict(self._of(record))})
        except Exception:  # noqa: BLE001 - the contract of logging.Handler
            self.handleError(record)
            return
        try:
            if self._lost:
                self._send(encode({**self._common, **self._loss()}))
                self._lost = 0
            self._send(entry)
        except BlockingIOError:
            self._lost += 1
        except OSError:
            self._fall_back(record)

    def flush(self) -> None:
        """Wait a moment until the journal has taken every entry; `logging` calls this at exit.

        The journal looks up the sender's unit when it takes an entry. Of a process that is gone
        by then it knows none, and nobody who asks for the unit's log would see the last words.
        """
        until = time.monotonic() + FLUSH_TIMEOUT
        while self._waiting() and time.monotonic() < until:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()

    def _waiting(self) -> bool:
        nbytes = array.array("i", [0])
        fcntl.ioctl(self._socket, termios.TIOCOUTQ, nbytes)
        return nbytes[0] > 0

    def _fall_back(self, record: logging.LogRecord) -> None:
        if _has_room(self._fallback.stream.fileno()):
            self._fallback.emit(record)
        else:
            self._lost += 1

    def _loss(self) -> dict[str, str]:
        text = f"{self._lost} entries before this one are lost: the journal took none"
        return {"MESSAGE": text, "PRIORITY": str(priority(logging.WARNING)), "LOGGER": __name__}

    def _of(self, record: logging.LogRecord) -> Iterator[tuple[str, str]]:
        yield "MESSAGE", self.format(record)
        yield "PRIORITY", str(priority(record.levelno))
        yield "LOGGER", record.name
        yield "CODE_FILE", record.pathname
        yield "CODE_LINE", str(record.lineno)
        yield "CODE_FUNC", record.funcName or ""
        if phase := getattr(record, "phase", ""):
            yield "PRELOADD_PHASE", str(phase)
        if code := error_code(record):
            yield "PRELOADD_ERROR_CODE", code

    def _send(self, entry: bytes) -> None:
        """Send an entry, one that is too long for a datagram in a sealed memory file."""
        try:
            self._socket.sendto(entry, self._path)
        except OSError as error:
            if error.errno not in _TOO_LONG:
                raise
            with sealed_bytes("preloadd-log", entry) as file:
                passed = array.array("i", [file.fileno()])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
                self._socket.sendmsg([], ancillary, 0, self._path)


class PriorityFormatter(logging.Formatter):
    """Begins each line with `<N>`, which the journal strips and takes for the entry's priority."""

    def format(self, record: logging.LogRecord) -> str:
        """The record, every line of a traceback with the priority: the journal splits at lines."""
        prefix = f"<{priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def encode(fields: Mapping[str, str]) -> bytes:
    """An entry of the native protocol. Values with line breaks are told with their length."""
    return b"".join(_field(name, value) for name, value in fields.items())


def priority(level: int) -> int:
    """The syslog priority of a level of `logging`."""
    return next((number for floor, number in _PRIORITIES if level >= floor), _DEBUG)


def error_code(record: logging.LogRecord) -> str:
    """The code of the error of ours that a record tells of, among its arguments or as its cause."""
    told = record.args if isinstance(record.args, tuple) else ()
    raised = record.exc_info[1] if record.exc_info else None
    return next((e.code for e in (*told, raised) if isinstance(e, PreloadError)), "")


def _has_room(fd: int) -> bool:
    """Whether a line can be written without waiting. Others share `fd`: its mode stays as it is."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def _field(name: str, value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    if b"\n" in data:
        return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)
    return b"%s=%s\n" % (name.encode(), data)
