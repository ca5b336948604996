"""The command line of this process, which every user of the host can read in /proc."""

from __future__ import annotations

import os
from pathlib import Path

_ARG_START, _ARG_END = 45, 46
"""Where the kernel keeps it in this process's memory; fields of /proc/self/stat after the name."""


def hide(secret: str) -> None:
    """Overwrite `secret` where it is a whole argument, or what stands behind the '=' of one.

    OSError if this system does not let a process do that.
    """
    wanted = os.fsencode(secret)
    start, end = _place()
    fd = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        at = start
        for word in os.pread(fd, end - start, start).split(b"\0"):
            if word == wanted or word.endswith(b"=" + wanted):
                os.pwrite(fd, b"x" * len(wanted), at + len(word) - len(wanted))
            at += len(word) + 1
    finally:
        os.close(fd)


def _place() -> tuple[int, int]:
    """The addresses at which the arguments begin and end."""
    # The name before may have any characters in it, brackets too.
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[_ARG_START]), int(fields[_ARG_END])
