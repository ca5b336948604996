"""The process behind `preloadd run`."""

from __future__ import annotations

import contextlib
import os
import sys

from preloadd.launcher import cli
from preloadd.linux import logs, streams


def main() -> None:
    """Run the command line and exit with the group's code."""
    streams.prepare()
    logs.configure("WARNING", os.environ, identifier="preloadd-run", waits=False)
    try:
        cli.main(sys.argv[1:])
    finally:
        _let_go_of_stdout()


def _let_go_of_stdout() -> None:
    """Drop what nobody reads: the interpreter's own attempt would replace the exit code by 120."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


if __name__ == "__main__":
    main()
