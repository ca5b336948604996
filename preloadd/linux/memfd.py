"""Memory files: anonymous memory behind a descriptor, and the seals that make it trustworthy.

A receiver may believe in a memfd's size and bytes only as far as its seals go; see memfd_create(2)
and the seals of fcntl(2).
"""

from __future__ import annotations

import errno
import fcntl
import os

from preloadd.errors import ProtocolViolation
from preloadd.linux.fds import OwnedFd

SEAL_SEAL = 0x01
"""No further seals."""
SEAL_SHRINK = 0x02
SEAL_GROW = 0x04
SEAL_WRITE = 0x08
"""No writing at all; refused by the kernel while a writable shared mapping exists."""
SEAL_FUTURE_WRITE = 0x10
"""No writing but through mappings that exist already (Linux 5.1). Unlike after SEAL_WRITE, kernels
before 6.7 still allow a shared read-only mapping."""

FIXED_SIZE = SEAL_SHRINK | SEAL_GROW
IMMUTABLE = FIXED_SIZE | SEAL_WRITE | SEAL_SEAL
"""The seals of a payload: nobody, its maker included, can change it."""

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
# Linux 6.3. Where vm.memfd_noexec is 2, memfd_create fails without it; older kernels refuse it.
_MFD_NOEXEC_SEAL = 0x08


def create(name: str) -> OwnedFd:
    """A new, empty, sealable, close-on-exec memfd. `name` (at most 249 bytes) shows in /proc."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return OwnedFd(os.memfd_create(name, flags | _MFD_NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return OwnedFd(os.memfd_create(name, flags))


def seal(fd: int, seals: int) -> None:
    """Add `seals`. EPERM after SEAL_SEAL, EBUSY for SEAL_WRITE while a writable mapping exists."""
    fcntl.fcntl(fd, _F_ADD_SEALS, seals)


def seals(fd: int) -> int:
    """The seals of `fd`. EINVAL if it is no memory file.

    Files on a tmpfs answer too, always with nothing but SEAL_SEAL.
    """
    return fcntl.fcntl(fd, _F_GET_SEALS)


def sealed_bytes(name: str, data: bytes | bytearray | memoryview) -> OwnedFd:
    """A memfd that holds `data` for ever. The caller owns it."""
    fd = create(name)
    try:
        _write_all(fd.fileno(), data)
        seal(fd.fileno(), IMMUTABLE)
    except BaseException:
        fd.close()
        raise
    return fd


def read_sealed(fd: int, limit: int) -> bytes:
    """The content of a payload received from a peer; borrows `fd`.

    ProtocolViolation unless it is a readable memfd of at most `limit` bytes that cannot change.
    """
    nbytes = _checked_size(fd, limit)
    data = bytearray(nbytes)
    window = memoryview(data)
    done = 0
    while done < nbytes:
        try:
            got = os.preadv(fd, [window[done:]], done)
        except OSError as error:
            raise ProtocolViolation(f"a payload cannot be read: {error.strerror}") from error
        if got == 0:
            raise ProtocolViolation(f"a payload of {nbytes} bytes ended after {done}")
        done += got
    return bytes(data)


def _checked_size(fd: int, limit: int) -> int:
    try:
        found = seals(fd)
    except OSError as error:
        raise ProtocolViolation("a payload came as something else than a memfd") from error
    if found & FIXED_SIZE != FIXED_SIZE or not found & (SEAL_WRITE | SEAL_FUTURE_WRITE):
        raise ProtocolViolation(
            f"a payload came unsealed (seals {found:#x}): it could still change"
        )
    nbytes = os.fstat(fd).st_size
    if nbytes > limit:
        raise ProtocolViolation(f"a payload of {nbytes} bytes, {limit} at most are accepted")
    return nbytes


def _write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    window = memoryview(data).cast("B")
    while window:
        window = window[os.write(fd, window) :]
