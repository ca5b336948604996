"""`preloadd admin`: reads the command line and turns errors into exit statuses."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from preloadd.admin.commands import parser
from preloadd.admin.denied import denied
from preloadd.admin.world import World
from preloadd.domain.lines import one_line
from preloadd.errors import EXIT_STATUS, ErrorCode, PreloadError


def main(arguments: Sequence[str] | None = None, world: World | None = None) -> int:
    """Carry out one command, on this host; the exit status (see `errors.EXIT_STATUS`)."""
    try:
        options = parser().parse_args(arguments)
        status = int(options.command(options, world or World(dict(os.environ))))
        sys.stdout.flush()
    except PreloadError as error:
        return _complain(str(error), error.exit_status)
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        _silence()
        return 0
    except PermissionError as error:
        return _complain(_denied(error), EXIT_STATUS[ErrorCode.DENIED])
    except OSError as error:
        _silence()
        return _complain(str(error), EXIT_STATUS[ErrorCode.READ_FAILED])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def _denied(error: PermissionError) -> str:
    if error.filename is None:
        return f"{error}: run this as root"
    return denied(Path(os.fsdecode(error.filename)), error.strerror or "it is refused")


def _complain(text: str, status: int) -> int:
    # Paths and what other programs said may be in it.
    sys.stderr.writelines(f"{one_line(line)}\n" for line in text.splitlines())
    return status


def _silence() -> None:
    """What is left in the buffer of standard output goes nowhere: the interpreter would try."""
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 no path of a file
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
