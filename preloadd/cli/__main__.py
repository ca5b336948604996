"""The process: what the command line needs of the world, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def main() -> NoReturn:
    """Carry out one command and exit."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        # Here, so that Ctrl-C is told from a crash even while these are imported.
        from preloadd.cli.app import run
        from preloadd.cli.world import World

        as_module = sys.argv[0] == __file__
        world = World(os.environ, os.geteuid(), sys.stdout, sys.stderr, as_module=as_module)
        status = run(sys.argv[1:], world)
    except KeyboardInterrupt:
        status = INTERRUPTED
    # What is left to do is the interpreter's, which would answer Ctrl-C with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """Leave by the usual way out: a terminal must be given back, a child ended."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
