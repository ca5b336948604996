"""Why nobody listens where a rank was looked for, though its daemon runs."""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path

from preloadd.linux.seqpacket import listens_unseen


class Unheard(Enum):
    """What such a daemon does."""

    STARTING = auto()
    HIDDEN = auto()
    """It serves behind a socket that was removed."""


def unheard(socket: Path, pid: int) -> tuple[Unheard, str]:
    """What is so, and what to tell of it, where connecting to `socket` found nobody.

    `pid` holds the lock of the daemon that would listen there. Blocks, for as long as the kernel
    takes to list its sockets.
    """
    if listens_unseen(socket):
        return Unheard.HIDDEN, (
            f"process {pid} serves, but its socket {socket} was removed, and nobody finds it: "
            "end its `preloadd run` and start that again, or `preloadctl restart` with systemd"
        )
    text = f"process {pid} runs and does not listen yet: see its log for how far it is"
    return Unheard.STARTING, text
