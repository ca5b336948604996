"""What a loader needs of its Python beside this package, told in one line where it is not there.

An engine's Python need not have preloadd: it is lent. So nothing is imported here that needs more
than Python itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from preloadd.errors import ConfigError, ProtocolViolation
from preloadd.linux.fds import OwnedFd
from preloadd.linux.passed import inherited
from preloadd.linux.seqpacket import connected

PACKAGES = ("blake3", "msgspec")
PLACES = "--python, or `python` in the group's file"
"""Where people name the interpreter."""

# These as in transport.probe, protocol.messages and protocol.codec, which need more.
PROBE = "--probe"
_LINK = "link"
_VERSION = 1


def lacks(error: ImportError) -> str:
    """What this Python lacks, by its name and that of the package."""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        return f"{sys.executable} lacks the package {error.name}"
    return f"{sys.executable} cannot import what that needs ({error})"


def lacking(
    error: ImportError,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    out: TextIO,
    err: TextIO,
) -> int:
    """Say what is missing to whoever asked: the rank, a launcher, people. The exit status.

    To who only asks for GPUs, that is an answer.
    """
    why = (
        f"{sys.executable} cannot run a loader ({error}): install the packages "
        f"{' and '.join(PACKAGES)} into it, or name another interpreter ({PLACES})"
    )
    status = ConfigError().exit_status
    match [*arguments]:
        case [probe] if probe == PROBE:
            out.write(f"{json.dumps({'problem': why, 'answered': False})}\n")
            return 0
        case ["fetch", *_]:
            out.write(f"{why}\n")
        case [] if _tell(inherited(environ, os.getpid()).get(_LINK, []), why):
            pass
        case _:
            err.write(f"preloadd-loader: {why}\n")
    return status


def _tell(links: Sequence[OwnedFd], why: str) -> bool:
    """Tell the rank at the other end of the link that was passed; whether there was a link."""
    for passed in links:
        with suppress(ProtocolViolation), connected(passed) as link:
            with suppress(OSError):
                link.send(failed(why))
            return True
    return False


def failed(why: str) -> bytes:
    """The packet by which a rank is told that there will be no weights, made by hand."""
    fields = {"type": "failed", "code": ConfigError.code.value, "detail": why}
    texts = [_packed(text) for field in fields.items() for text in field]
    return bytes([_VERSION, 0x80 | len(fields)]) + b"".join(texts)


def _packed(text: str) -> bytes:
    """A text in msgpack, with its length in two bytes."""
    data = text.encode(errors="backslashreplace")
    return b"\xda" + len(data).to_bytes(2, "big") + data
