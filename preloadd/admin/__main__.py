"""`preloadd admin`: reads the command line and turns errors into exit statuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from preloadd.admin.commands import parser
from preloadd.admin.world import World
from preloadd.errors import PreloadError


def main(arguments: Sequence[str] | None = None, world: World | None = None) -> int:
    """Carry out one command, on this host; the exit status (see `errors.EXIT_STATUS`)."""
    options = parser().parse_args(arguments)
    try:
        return int(options.command(options, world or World(dict(os.environ))))
    except PreloadError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
