"""Who is at the other end of a socket, as the kernel knows it; numbers of users and groups."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import struct
from array import array
from collections.abc import Callable

from preloadd.domain.access import Peer, Policy
from preloadd.domain.settings import Access
from preloadd.errors import ConfigError

_SO_PEERGROUPS = 59
_UCRED = struct.Struct("3i")
# `socket.getsockopt` refuses longer buffers than 1024 bytes; a process may have 65536 groups.
_PYTHON_LIMIT = 1024


def peer(sock: socket.socket) -> Peer:
    """The process that connected, or for a client the one that called listen; as of that moment.

    After a fork or exec the number may belong to another program: use it to name, not to decide.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return Peer(pid, uid, frozenset({gid, *_groups(sock)}))


def user_id(name: str) -> int:
    """The number of a user given by name or number; ConfigError if there is none."""
    return _number(name, "user", lambda: pwd.getpwnam(name).pw_uid)


def group_id(name: str) -> int:
    """The number of a group given by name or number; ConfigError if there is none."""
    return _number(name, "group", lambda: grp.getgrnam(name).gr_gid)


def policy(access: Access, owner: int) -> Policy:
    """What `access` means on this host for a daemon that runs as `owner`; ConfigError."""
    users, groups = map(user_id, access.users), map(group_id, access.groups)
    return Policy(owner, frozenset(users), frozenset(groups))


def _groups(sock: socket.socket) -> array[int]:
    """The supplementary groups; empty before Linux 4.13."""
    groups = array("I")
    try:
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _PYTHON_LIMIT))
    except OSError as error:
        if error.errno == errno.ERANGE:
            return _many_groups(sock)
        if error.errno != errno.ENOPROTOOPT:
            raise
    return groups


def _many_groups(sock: socket.socket) -> array[int]:
    import ctypes  # costs a millisecond, for what hardly anybody has

    libc = ctypes.CDLL(None, use_errno=True)
    size = _PYTHON_LIMIT
    while True:
        buffer, length = ctypes.create_string_buffer(size), ctypes.c_uint(size)
        failed = libc.getsockopt(
            sock.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, buffer, ctypes.byref(length)
        )
        if not failed:
            return array("I", buffer.raw[: length.value])
        if ctypes.get_errno() != errno.ERANGE:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # The kernel has written the length it needs.
        size = length.value


def _number(name: str, kind: str, look_up: Callable[[], int]) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return look_up()
    except KeyError as error:
        raise ConfigError(
            f"there is no {kind} {name!r} on this host: create it, or correct the access settings"
        ) from error
