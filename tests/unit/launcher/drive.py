"""`preloadd run` with stand-ins in place of ranks: a real launcher process, to be sent signals.

python drive.py STAND_IN_FOLDER SOCKET_DIR [FIELD=VALUE ...] [--ARGUMENT-OF-VLLM=VALUE ...]
"""

import os
import sys
from pathlib import Path

import anyio

from preloadd.config.run import parse_run
from preloadd.errors import PreloadError
from preloadd.launcher.progress import complain, make_display
from preloadd.launcher.start import Start
from preloadd.linux.outlet import outlet

STAND_IN = Path(__file__).with_name("stand_in.py")


def main() -> int:
    folder, socket_dir, *fields = sys.argv[1:]
    given = {"model": folder, "weight_cache_socket_dir": socket_dir}
    given["memory"] = "host"
    given |= dict(field.split("=", 1) for field in fields if not field.startswith("--"))
    engine = [field for field in fields if field.startswith("--")]
    try:
        start = Start(
            parse_run(given, engine),
            dict(os.environ),
            make_display(outlet(sys.stdout)),
            rank=lambda settings: [sys.executable, str(STAND_IN), folder, settings.instance],
            fetch=lambda python: [python, f"{folder}/fetch.py"],
            loader=lambda python: [python, f"{folder}/loader.py"],
        )
        return anyio.run(start.run)
    except PreloadError as error:
        complain(sys.stderr, error)
        return error.exit_status


sys.exit(main())
