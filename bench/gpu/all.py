"""All benchmarks on the GPU, one after the other, with one checkpoint for those that need a large.

Leaves in the folder given: the JSON of each, and `tables.txt` with all tables. Each runs in a
process of its own with a limit of its own, so that none takes the others' figures along. Takes
about 9 minutes on an H200, and 40 GiB of disk below `--work` (default: a temporary folder).
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.gpu.checkpoints import GIB, dense
from bench.gpu.session import DRY_RUN

GIBIBYTES = 32
FILES = 16
LEFT_S = 30
LIMITS = {"attach": 230, "adopt": 110, "load": 220, "leaks": 100}
"""Seconds. What takes longer is broken off with what it has."""


def main() -> int:
    """Run them; 1 if one found a broken promise or gave up, 2 if one could not even begin."""
    parser = argparse.ArgumentParser(
        prog="bench.gpu.all",
        description=__doc__.partition("\n")[0],
        epilog=f"Further options go to each of {', '.join(LIMITS)}: --runs, --gpu, --memory and "
        "others that all of them have.",
    )
    parser.add_argument("out", type=Path, help="folder for JSON and tables")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep large files here")
    parser.add_argument(
        "--only", type=_names, default=",".join(LIMITS), help="default: %(default)s"
    )
    parser.add_argument("--limit", type=int, default=660, metavar="SECONDS", help="for all of them")
    parser.add_argument("--gib", type=float, default=GIBIBYTES, help="size of the large checkpoint")
    given, others = parser.parse_known_args()
    if not _can_begin(given, others):
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    given.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        work = given.work
        if work is None:
            work = Path(tempfile.mkdtemp(prefix="preloadd-bench-"))
            undo.callback(shutil.rmtree, work, ignore_errors=True)
        codes = _run(given, work.absolute(), others)
    return int(any(codes))


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in LIMITS]:
        raise argparse.ArgumentTypeError(
            f"there is no {', '.join(unknown)}: name some of {', '.join(LIMITS)}"
        )
    return names


def _can_begin(given: argparse.Namespace, others: list[str]) -> bool:
    """Whether all of them understand their arguments and find a GPU, before gigabytes are written.

    The first that does not says why.
    """
    return all(
        subprocess.call([sys.executable, "-m", f"bench.gpu.{name}", DRY_RUN, *others]) == 0
        for name in given.only
    )


def _run(given: argparse.Namespace, work: Path, others: list[str]) -> list[int]:
    deadline = time.monotonic() + given.limit
    print("making a checkpoint …", file=sys.stderr, flush=True)
    large = dense(work / f"dense-{given.gib:g}", FILES, int(given.gib * GIB))
    own: dict[str, list[str]] = {
        "adopt": ["--gib", f"{given.gib:g}"],
        "load": ["--whole", str(large), "--files", str(FILES // 2)],
    }
    codes = []
    with (given.out / "tables.txt").open("w") as tables:
        for name in given.only:
            left = int(deadline - time.monotonic()) - LEFT_S
            limit = min(LIMITS[name], left)
            if limit <= 0:
                print(f"{name}: not begun: the time is over", file=tables, flush=True)
                codes.append(1)
                continue
            command = [sys.executable, "-m", f"bench.gpu.{name}", "--work", str(work)]
            command += ["--json", str(given.out / f"{name}.json"), "--limit", str(limit)]
            codes.append(_one([*command, *own.get(name, []), *others], tables.fileno(), limit))
    sys.stdout.write((given.out / "tables.txt").read_text())
    return codes


def _one(command: list[str], output: int, limit: int) -> int:
    """One of them; it breaks itself off, and is broken off if it does not."""
    with subprocess.Popen(command, stdout=output) as process:
        try:
            return process.wait(limit + LEFT_S)
        except subprocess.TimeoutExpired:
            return _ended(process)
        except BaseException:
            # It removes what it made, which this process does only afterwards.
            _ended(process)
            raise


def _ended(process: subprocess.Popen[bytes]) -> int:
    """End it, by force if need be; how it ended."""
    process.terminate()
    try:
        return process.wait(LEFT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
