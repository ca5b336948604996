import os
import subprocess
import sys
from pathlib import Path

import preloadd

ROOT = Path(preloadd.__file__).parents[1]


def test_exit_code_survives_a_reader_that_went_away(socket_dir):
    """Rank CPU-0 fails at once: its settings name a model that is no checkpoint."""
    (socket_dir / "model").mkdir()
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "preloadd.launcher"),
                *("--model", str(socket_dir / "model")),
                *("--weight-cache-socket-dir", str(socket_dir / "s")),
            ],
            cwd=ROOT,
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    assert done.returncode not in (0, 1, 120)
    assert "BrokenPipe" not in done.stderr


def test_usage_errors_exit_with_two():
    done = subprocess.run(
        [sys.executable, "-m", "preloadd.launcher", "--no-such-flag"],
        cwd=ROOT,
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == 2
