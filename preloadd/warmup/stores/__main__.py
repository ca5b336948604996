"""Whether stores can be used as they are configured, tried as the user that runs this.

`python -m preloadd.warmup.stores PYTHON NAME…`, where PYTHON is the engine's, '' for this one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from preloadd.errors import PreloadError
from preloadd.linux.lending import lend
from preloadd.warmup.stores.opening import open_stores


def main(arguments: Sequence[str]) -> int:
    """The exit status; on standard error a line for each fault."""
    python, *names = arguments
    with TemporaryDirectory(prefix="preloadd-") as folder:
        environ = lend(Path(folder), os.environ) if python else dict(os.environ)
        try:
            open_stores(names, environ, python=python).close()
        except PreloadError as error:
            sys.stderr.write(f"{error}\n")
            return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
