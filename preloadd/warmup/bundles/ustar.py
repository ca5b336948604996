"""The bytes of a bundle: a tar of regular files with nothing in it but names, sizes and content.

There is one way to write each. So whoever reads a bundle takes no header apart: he knows which one
has to come, and whatever else is there is refused, be it a link, a device or another name.
"""

from __future__ import annotations

from collections.abc import Iterable

BLOCK = 512
END = bytes(2 * BLOCK)
"""What is after the last file."""

MAX_FILE = 8**11 - 1
"""Bytes that a header can say."""

_NAME, _PREFIX = 100, 155
_MODE = 0o600


def header(path: str, nbytes: int) -> bytes:
    """What is before the content of the file `path`, which is ASCII."""
    split = _split(path)
    if split is not None:
        return _block(*split, nbytes, b"0")
    record = _record(path)
    told = _block("", "././@PaxHeader", len(record), b"x") + record + padding(len(record))
    return told + _block("", path[-_NAME:], nbytes, b"0")


def padding(nbytes: int) -> bytes:
    """What is after so many bytes of content."""
    return bytes(-nbytes % BLOCK)


def length(files: Iterable[tuple[str, int]]) -> int:
    """Bytes of a bundle of these files, each a path and a size."""
    return len(END) + sum(
        len(header(path, nbytes)) + nbytes + len(padding(nbytes)) for path, nbytes in files
    )


def _split(path: str) -> tuple[str, str] | None:
    """Prefix and name, of which the format has room for so much; None if it has not enough."""
    if len(path) <= _NAME:
        return "", path
    at = path.find("/", len(path) - _NAME - 1)
    return (path[:at], path[at + 1 :]) if 0 < at <= _PREFIX else None


def _record(path: str) -> bytes:
    """The name of the next file, for which the format has no room; its own length is part of it."""
    rest = f" path={path}\n"
    nbytes = len(rest)
    while nbytes != len(str(nbytes)) + len(rest):
        nbytes = len(str(nbytes)) + len(rest)
    return f"{nbytes}{rest}".encode("ascii")


def _block(prefix: str, name: str, nbytes: int, kind: bytes) -> bytes:
    if not 0 <= nbytes <= MAX_FILE:
        raise ValueError(f"a file of {nbytes:,} bytes")
    before = b"".join(
        (
            name.encode("ascii").ljust(_NAME, b"\0"),
            *(b"%07o\0" % number for number in (_MODE, 0, 0)),  # neither user nor group
            *(b"%011o\0" % number for number in (nbytes, 0)),  # written at no time
        )
    )
    after = kind + bytes(100) + b"ustar\x0000" + bytes(64 + 16)
    after += prefix.encode("ascii").ljust(_PREFIX, b"\0") + bytes(12)
    return before + b"%06o\0 " % (sum(before) + sum(after) + 8 * ord(" ")) + after
