"""Why nobody listens where a rank was looked for."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from preloadd.linux.seqpacket import listens_unseen


class Silence(Enum):
    """What became of the daemon. A hidden one serves behind a socket that was removed."""

    ENDED = "ended"
    STARTING = "starting"
    HIDDEN = "hidden"


def silence(socket: Path, pid: int | None) -> tuple[Silence, str]:
    """What is so, and what to tell of it, where connecting to `socket` found nobody.

    `pid` holds the lock of the daemon that would listen there; None if nobody does.
    """
    if pid is None:
        return Silence.ENDED, f"its daemon has ended: nobody listens on {socket}"
    if listens_unseen(socket):
        return Silence.HIDDEN, (
            f"process {pid} serves, but its socket {socket} was removed, and nobody finds it: "
            "`preloadctl restart`, or end its `preloadd run` and start that again"
        )
    text = f"process {pid} runs and does not listen yet: see its log for how far it is"
    return Silence.STARTING, text
