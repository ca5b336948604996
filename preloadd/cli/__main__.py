"""The process: what the command line needs of the world, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn, TextIO

from preloadd.errors import EXIT_STATUS, ErrorCode

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
        out, err = _stream(sys.stdout, 1), _stream(sys.stderr, 2)
        world = World(os.environ, os.geteuid(), out, err, as_module=as_module)
        status = run(sys.argv[1:], world)
    except ModuleNotFoundError as error:
        # The text is the whole of it to an administrator who named another interpreter.
        sys.stderr.write(
            f"preloadctl: {sys.executable} has no package {error.name}: `preloadctl doctor` says "
            "what to do\n"
        )
        status = EXIT_STATUS[ErrorCode.CONFIG]
    except KeyboardInterrupt:
        status = INTERRUPTED
    # What is left to do is the interpreter's, which would answer Ctrl-C with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


def _stream(stream: TextIO | None, fd: int) -> TextIO:
    """`stream`; if there is none, since `fd` was closed, one that cannot be written either."""
    if stream is not None:
        return stream
    nowhere = os.open(os.devnull, os.O_RDONLY)
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)
    return open(fd, "w", encoding="utf-8", closefd=False)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """Leave by the usual way out: a terminal must be given back, a child ended."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
