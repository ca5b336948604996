"""The identity of a file: what must be equal for its content to be taken as unchanged unread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class FileIdentity:
    """Device and inode numbers, size in bytes, and both times in nanoseconds since the epoch.

    The change time cannot be set by `utimensat`, so a file whose content was replaced in place
    under a restored modification time still differs.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
