"""Descriptors and credentials beside the data of a packet: the one place that calls recvmsg.

`socket.recv_fds` is not used: what it returns is inheritable whatever flags it is given, so that
any child of the receiver would pin the memory behind the descriptors.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from preloadd.errors import OutOfDescriptors, ProtocolViolation
from preloadd.linux.fds import MAX_FDS, OwnedFd, exhausted, is_exhausted

_CREDENTIALS = struct.Struct("3i")
# Room for the most the kernel passes on, so that truncation always means trouble.
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_LEN(MAX_FDS * array("i").itemsize)


@dataclass(frozen=True, slots=True)
class Received:
    """One packet. The holder owns `fds`; `pid` is the sender's, 0 unless SO_PASSCRED is on."""

    data: bytes
    fds: tuple[OwnedFd, ...]
    pid: int


def send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one packet with at most MAX_FDS borrowed descriptors, whole or not at all."""
    if len(fds) > MAX_FDS:
        raise ValueError(f"{len(fds)} descriptors in one packet, {MAX_FDS} at most")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


def receive(sock: socket.socket, limit: int) -> Received:
    """Receive one packet of at most `limit` bytes with its descriptors, all close-on-exec.

    ProtocolViolation if the kernel cut data or descriptors, OutOfDescriptors if it did so because
    this process may open no more; whatever arrived is closed then.
    """
    data, messages, flags, _ = sock.recvmsg(limit, _ROOM, socket.MSG_CMSG_CLOEXEC)
    # Owned before anything else can fail.
    fds = tuple(OwnedFd(fd) for fd in _rights(messages))
    with ExitStack() as undo:
        for fd in fds:
            undo.callback(fd.close)
        if flags & socket.MSG_TRUNC:
            raise ProtocolViolation(f"a packet of more than {limit} bytes")
        if flags & socket.MSG_CTRUNC:
            raise _truncated(sock, len(fds))
        undo.pop_all()
    return Received(data, fds, _sender(messages))


def _rights(messages: list[tuple[int, int, bytes]]) -> array[int]:
    found = array("i")
    for level, kind, content in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return found


def _sender(messages: list[tuple[int, int, bytes]]) -> int:
    for level, kind, content in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid, _, _ = _CREDENTIALS.unpack(content)
            return int(pid)
    return 0


def _truncated(sock: socket.socket, arrived: int) -> ProtocolViolation | OutOfDescriptors:
    """Why descriptors are missing. At the limit the kernel drops them without any other sign."""
    doing = f"receiving descriptors ({arrived} arrived, then the kernel dropped the rest)"
    try:
        os.close(os.dup(sock.fileno()))
    except OSError as error:
        if is_exhausted(error):
            return exhausted(error, doing)
        raise
    return ProtocolViolation(
        f"the kernel cut the descriptors of a packet after {arrived}: too many were sent, or a "
        "security module refused one"
    )
