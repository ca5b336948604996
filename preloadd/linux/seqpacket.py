"""SOCK_SEQPACKET sockets of AF_UNIX: one packet is one message, its descriptors belong to it."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, ProtocolViolation
from preloadd.linux import ancillary
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner
from preloadd.linux.paths import unusable

MAX_PATH = 107
"""Bytes of a socket's path: `sun_path` holds 108 with its final zero."""

_LISTENING = 1 << 16  # __SO_ACCEPTCON


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet. Whoever holds it owns `fds`."""

    data: bytes
    fds: tuple[OwnedFd, ...] = ()

    @property
    def eof(self) -> bool:
        """Whether the peer has closed its end.

        The kernel reports an empty packet and the end alike. No message of ours is empty, so both
        are taken for the end.
        """
        return not self.data

    def close(self) -> None:
        """Close the descriptors nobody took."""
        for fd in self.fds:
            fd.close()


class Pressure(Enum):
    """What a sender that met back-pressure waits for."""

    WRITABLE = "until the socket is writable"
    PAUSE = "a moment: the socket polls writable all the while"


def pressure(error: OSError) -> Pressure | None:
    """What to wait for before sending again, or None if `error` is a real failure.

    ETOOMANYREFS: this user has more descriptors in flight than RLIMIT_NOFILE, over all sockets.
    """
    if error.errno == errno.EAGAIN:
        return Pressure.WRITABLE
    if error.errno in {errno.ETOOMANYREFS, errno.ENOBUFS}:
        return Pressure.PAUSE
    return None


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected, blocking, close-on-exec sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def adopted(fd: OwnedFd) -> socket.socket:
    """The SOCK_SEQPACKET socket that was passed as `fd`, which is taken; the caller owns it.

    ProtocolViolation, and `fd` is closed, if it is something else.
    """
    sock = socket_of(fd)
    if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        sock.close()
        raise ProtocolViolation("a socket of another kind")
    return sock


def connected(fd: OwnedFd) -> socket.socket:
    """The same; ProtocolViolation as well if nobody ever was at its other end: it is fresh, or
    listens. Who has hung up since was there."""
    with ExitStack() as undo:
        sock = undo.enter_context(adopted(fd))
        try:
            sock.getpeername()
        except OSError as error:
            raise ProtocolViolation(f"a socket without a peer: {error.strerror}") from error
        undo.pop_all()
    return sock


def socket_of(fd: OwnedFd) -> socket.socket:
    """The socket of whatever kind that was passed as `fd`; as `adopted`."""
    with fd:
        try:
            sock = socket.socket(fileno=fd.fileno())
        except OSError as error:
            raise ProtocolViolation(f"no socket: {error.strerror}") from error
        fd.take()
    return sock


class Reservation(Owner):
    """A socket that is bound beside `path` and owned by this, until `listen` lets it be seen there,
    with `mode` and, unless -1, `group`.

    So what stands in its way is told by the time this is made: ConfigError if the path is too long
    or no socket can be there, OutOfDescriptors. The path appears at once and complete: who sees it
    can connect to it. A socket or file that is there already is replaced, so the caller holds the
    lock of the folder.
    """

    def __init__(self, path: Path, mode: int, *, group: int = -1) -> None:
        check_length(path)
        self._path, self._temporary = path, _beside(path)
        with ExitStack() as undo:
            try:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(self._socket.close)
                self._temporary.unlink(missing_ok=True)
                self._socket.bind(os.fspath(self._temporary))
                undo.callback(self._temporary.unlink, missing_ok=True)
                set_access(self._temporary, mode, group=group)
            except OSError as error:
                raise unusable(self._temporary, error) from error
            if path.is_dir() and not path.is_symlink():
                raise unusable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
            self._undo = undo.pop_all()

    def listen(self, backlog: int) -> socket.socket:
        """The socket, which listens at the path from now on and is the caller's. Call it once."""
        try:
            self._socket.listen(backlog)
            self._temporary.rename(self._path)
        except OSError as error:
            raise unusable(self._path, error) from error
        self._undo.pop_all()
        return self._socket

    def close(self) -> None:
        """Give up a socket that does not listen yet."""
        self._undo.close()


def remove(path: Path) -> None:
    """Remove what a daemon that was killed has left of its socket at `path`. OSError."""
    _beside(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def listens_unseen(path: Path) -> bool:
    """Whether a socket of a `Reservation` listens that was at `path` and is not there any more.

    Looks into the kernel's list; where there is none, nobody is said to listen.
    """
    if os.path.lexists(path):
        return False
    beside = _beside(path)
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_bytes().splitlines()[1:]:
            words = line.split(None, 7)
            if len(words) == 8 and int(words[3], 16) & _LISTENING:
                bound = Path(os.fsdecode(words[7]))
                if bound.name == beside.name and _is_same(bound.parent, beside.parent):
                    # Since the first look it may have begun to listen, and got its name.
                    return not os.path.lexists(path)
    return False


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return False


def set_access(path: Path, mode: int, *, group: int = -1) -> None:
    """Say who may connect to the socket at `path`: its `mode` and, unless -1, its `group`.

    Where that is said already nothing is changed, as nothing can be on a disk that is read-only.
    """
    found = path.lstat()
    if group not in (-1, found.st_gid):
        os.chown(path, -1, group, follow_symlinks=False)
    if stat.S_IMODE(found.st_mode) != mode:
        path.chmod(mode)


def connect(path: Path, *, timeout: float | None = None) -> socket.socket:
    """A blocking socket connected to `path`; the caller owns it.

    ConfigError if the path is too long; TimeoutError if the listener's queue stays full for
    `timeout` seconds. Connecting needs no answer of the daemon: check `peers.peer` for who listens.
    """
    check_length(path)
    with ExitStack() as undo:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.callback(sock.close)
        # A non-blocking connect to a full queue fails at once and cannot be polled for;
        # a blocking one waits as long as a send may.
        set_send_timeout(sock, timeout)
        try:
            sock.connect(os.fspath(path))
        except BlockingIOError as error:
            raise TimeoutError(f"{path} did not accept a connection in {timeout} s") from error
        set_send_timeout(sock, None)
        undo.pop_all()
    return sock


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet with borrowed descriptors. OSError: see `pressure`."""
    if not data:
        raise ValueError("an empty packet would look like the end of the connection")
    ancillary.send(sock, data, fds)


def receive(sock: socket.socket, limit: int) -> Packet:
    """Receive one packet of at most `limit` bytes; the caller owns its descriptors.

    At the end of the connection the packet is `eof`. ProtocolViolation if the packet does not fit
    or lost descriptors on the way, OutOfDescriptors if this process cannot take them.
    """
    received = ancillary.receive(sock, limit)
    packet = Packet(received.data, received.fds)
    if packet.eof and packet.fds:
        packet.close()
        raise ProtocolViolation("a packet with descriptors but no message")
    return packet


def connect_now(path: Path) -> socket.socket:
    """A non-blocking socket connected to `path`, which the caller owns.

    OSError if that is not possible at once (EAGAIN: the queue is full).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)  # noqa: FBT003
        sock.connect(os.fspath(path))
    except BaseException:
        sock.close()
        raise
    return sock


def check_length(path: Path) -> None:
    """ConfigError if the kernel could not take `path` as a socket's address."""
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise ConfigError(
            f"the socket path {one_line(path)} has {length} bytes, the kernel takes {MAX_PATH} at "
            "most: choose a shorter socket directory"
        )


def _beside(path: Path) -> Path:
    """Of the same length or shorter, so that it fits whenever the path does."""
    return path.with_name("~" + path.name[1:])


def set_send_timeout(sock: socket.socket, seconds: float | None) -> None:
    """Let a send on a blocking socket wait at most so long (None: for ever); then it is EAGAIN."""
    # The kernel takes zero for "no timeout".
    microseconds = 0 if seconds is None else max(1, int(seconds * 1_000_000))
    timeval = struct.pack("@ll", *divmod(microseconds, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
